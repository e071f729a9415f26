#!/bin/sh
# Checks what the machine itself must bring, before anything is installed. One line per problem, and what to install.
#
#   bootstrap.sh python   prints the path of a CPython 3.11 or newer ($PYTHON, or the first fitting on the search path)
#   bootstrap.sh java     Java 17 or newer ($JAVA_HOME, or the first on the search path)
#   bootstrap.sh maven    Maven ($MVN, or mvn on the search path)
#   bootstrap.sh all      all of them, printing nothing
set -u

fail() {
    echo "fairlane: $*" >&2
    exit 1
}

fits='import sys; sys.exit(not (sys.implementation.name == "cpython" and sys.version_info >= (3, 11)))'

check_python() {
    if [ -n "${PYTHON:-}" ]; then
        found=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not a program: set it to a CPython 3.11 or newer"
        "$found" -c "$fits" 2>/dev/null || fail "PYTHON=$PYTHON is not CPython 3.11 or newer: set it to one that is"
        echo "$found"
        return
    fi
    for name in python3.13 python3.12 python3.11 python3; do
        if found=$(command -v "$name") && "$found" -c "$fits" 2>/dev/null; then
            echo "$found"
            return
        fi
    done
    fail "CPython 3.11 or newer is needed: install python3.11 (or newer) with its venv package, or set PYTHON"
}

check_java() {
    if [ -n "${JAVA_HOME:-}" ] && [ -x "$JAVA_HOME/bin/java" ]; then
        found=$JAVA_HOME/bin/java
    else
        found=$(command -v java) || fail "Java 17 or newer is needed: install openjdk-17-jre-headless, or set JAVA_HOME"
    fi
    version=$("$found" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -n 1)
    [ -n "$version" ] || fail "$found does not tell its version: install openjdk-17-jre-headless, or set JAVA_HOME"
    [ "$version" -ge 17 ] ||
        fail "Java 17 or newer is needed, $found is $version: install openjdk-17-jre-headless, or set JAVA_HOME"
}

check_maven() {
    command -v "${MVN:-mvn}" >/dev/null || fail "Maven is needed: install maven, or set MVN to the path of mvn"
}

case "${1:-}" in
python) check_python ;;
java) check_java ;;
maven) check_maven ;;
all)
    check_python >/dev/null
    check_java
    check_maven
    ;;
*) fail "usage: bootstrap.sh python|java|maven|all" ;;
esac
