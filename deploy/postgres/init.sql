-- Run by psql, as the superuser, when the volume of docker-compose.yml is new. The same as create_roles() in
-- deploy/local/postgres.py: an owner of the tables, a role for each service that owns nothing and cannot bypass
-- row-level security, and their database with the vector extension. `fairlane db upgrade` gives the roles their rights.
\set ON_ERROR_STOP on
\getenv owner_password POSTGRES_OWNER_PASSWORD
\getenv dispatcher_password POSTGRES_DISPATCHER_PASSWORD
\getenv recorder_password POSTGRES_RECORDER_PASSWORD
\getenv gateway_password POSTGRES_GATEWAY_PASSWORD
\getenv backfill_password POSTGRES_BACKFILL_PASSWORD
\getenv ingest_password POSTGRES_INGEST_PASSWORD
\getenv operator_password POSTGRES_OPERATOR_PASSWORD
\getenv admin_password POSTGRES_ADMIN_API_PASSWORD

-- A statement that fails is logged, and these hold passwords.
SET log_min_error_statement = panic;
SET log_statement = none;
SET password_encryption = 'scram-sha-256';

CREATE ROLE fairlane_owner LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE CREATEDB PASSWORD :'owner_password';
CREATE ROLE fairlane_dispatcher LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'dispatcher_password';
CREATE ROLE fairlane_recorder LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'recorder_password';
CREATE ROLE fairlane_gateway LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'gateway_password';
CREATE ROLE fairlane_backfill LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'backfill_password';
CREATE ROLE fairlane_ingest LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'ingest_password';
CREATE ROLE fairlane_operator LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'operator_password';
CREATE ROLE fairlane_admin LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'admin_password';
CREATE DATABASE fairlane OWNER fairlane_owner;

\connect fairlane
CREATE EXTENSION vector;
