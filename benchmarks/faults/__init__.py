"""Kill, pause and end processes of a pipeline under load, then check its promises against the log and Postgres.

Shared by benchmarks and fault tests: ``plan`` chooses victims, ``rig`` knows the pipeline and the owners of partitions
and strikes, ``traffic`` sends requests while a plan is carried out, ``promise`` checks the log and Postgres.
"""
