#!/bin/sh
# Makes FOLDER/nginx, without root: a link to the NGINX of this machine, or one from Debian's package, which is unpacked
# and not installed. Its libraries are fetched too where the machine lacks them.
#
#   install.sh FOLDER
set -eu

remedy='install nginx, or set SKIP_NGINX=1 to leave the edge out'
# shellcheck source=deploy/debian.sh
. "$(dirname "$0")/../debian.sh"

folder=${1:?usage: install.sh FOLDER}
rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# The search path of users often lacks /usr/sbin.
for found in "$(command -v nginx || true)" /usr/sbin/nginx; do
    if [ -x "$found" ]; then
        ln -s "$found" "$folder/nginx"
        exit
    fi
done

unpack nginx
program=$folder/root/usr/sbin/nginx
if ldd "$program" | grep -q 'not found'; then
    unpack libcrypt1 libpcre2-8-0 libssl3 zlib1g
fi
libraries=$(find "$folder/root" -name 'lib*.so.*' -exec dirname {} + | sort -u | paste -sd:)
cat >"$folder/nginx" <<SCRIPT
#!/bin/sh
LD_LIBRARY_PATH='$libraries' exec '$program' "\$@"
SCRIPT
chmod +x "$folder/nginx"
tidy
"$folder/nginx" -v >/dev/null 2>&1 || fail "the fetched nginx does not start: $remedy"
