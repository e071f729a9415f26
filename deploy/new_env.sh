#!/bin/sh
# Makes .env from .env.example, with a random password for each one that is asked for. Never changes a file that is there.
set -eu
cd "$(dirname "$0")/.."
if [ -e .env ]; then
    echo 'fairlane: .env exists already: remove it, or fill it in by hand' >&2
    exit 1
fi
umask 077
while IFS= read -r line; do
    case $line in
        [A-Z]*_PASSWORD=) printf '%s%s\n' "$line" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" ;;
        *) printf '%s\n' "$line" ;;
    esac
done <.env.example >.env.new
mv .env.new .env
echo 'fairlane: made .env; set TORCH_INDEX_URL in it'
