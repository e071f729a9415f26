-- Run by psql, as the superuser, when the volume of docker-compose.yml is new. The same as create_roles() in
-- deploy/local/postgres.py: an owner of the tables, roles of the services and of the gateway that own nothing and
-- cannot bypass row-level security, and their database with the vector extension.
\set ON_ERROR_STOP on
\getenv owner_password POSTGRES_OWNER_PASSWORD
\getenv service_password POSTGRES_SERVICE_PASSWORD
\getenv gateway_password POSTGRES_GATEWAY_PASSWORD

-- A statement that fails is logged, and these hold passwords.
SET log_min_error_statement = panic;
SET log_statement = none;
SET password_encryption = 'scram-sha-256';

CREATE ROLE fairlane_owner LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE CREATEDB PASSWORD :'owner_password';
CREATE ROLE fairlane LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'service_password';
CREATE ROLE fairlane_gateway LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE NOCREATEDB PASSWORD :'gateway_password';
CREATE DATABASE fairlane OWNER fairlane_owner;

\connect fairlane
CREATE EXTENSION vector;
