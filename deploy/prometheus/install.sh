#!/bin/sh
# Makes FOLDER/promtool, which evaluates the alert rules in tests, without root: a link to the one of this machine, or
# that of Debian's package of Prometheus (19 MB), which is unpacked and not installed.
#
#   install.sh FOLDER
set -eu

remedy='install promtool, or set SKIP_PROMTOOL=1 to leave the evaluation of alert rules out'
# shellcheck source=deploy/debian.sh
. "$(dirname "$0")/../debian.sh"

folder=${1:?usage: install.sh FOLDER}
rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

if found=$(command -v promtool); then
    ln -s "$found" "$folder/promtool"
    exit
fi

unpack prometheus
mv "$folder/root/usr/bin/promtool" "$folder/promtool"
rm -rf "$folder/root"
tidy
"$folder/promtool" --version >/dev/null 2>&1 || fail "the fetched promtool does not start: $remedy"
