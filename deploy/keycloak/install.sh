#!/bin/sh
# Fetch Keycloak into a folder and prepare it to start. Usage: install.sh FOLDER (made anew).
set -eu

here=$(cd "$(dirname "$0")" && pwd)
# Maven takes a relative path for one in the folder of its file.
case $1 in /*) folder=$1 ;; *) folder=$PWD/$1 ;; esac
# Of keycloak-quarkus-dist-26.4.7.zip
sha256=dd9834c023460be856f731423d86228c23b5d002194a2064642bec0cc6573eaa

rm -rf "$folder" "$folder.new"
mkdir -p "$folder.new"
"${MVN:-mvn}" -q -B -Dstyle.color=never -f "$here/pom.xml" dependency:copy -DoutputDirectory="$folder.new"
archive=$(ls "$folder.new"/*.zip)
echo "$sha256  $archive" | sha256sum --check --quiet -
( cd "$folder.new" && "${PYTHON:-python3}" -m zipfile -e "$archive" . )
rm "$archive"
mv "$folder.new"/keycloak-*/* "$folder.new"
# The options that cannot be given at the start: a database in memory.
sh "$folder.new/bin/kc.sh" build --db=dev-mem --health-enabled=false --metrics-enabled=false > "$folder.new/build.log"
mv "$folder.new" "$folder"
