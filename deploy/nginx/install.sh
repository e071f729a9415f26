#!/bin/sh
# Makes FOLDER/nginx, without root: a link to the NGINX of this machine, or one from Debian's package, which is unpacked
# and not installed. Its libraries are fetched too where the machine lacks them.
#
#   install.sh FOLDER
set -eu

fail() {
    echo "fairlane: $*" >&2
    exit 1
}

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

remedy='install nginx, or set SKIP_NGINX=1 to leave the edge out'
command -v apt-get >/dev/null && command -v dpkg >/dev/null || fail "there is no nginx, and no Debian to fetch it from: $remedy"

# Unpack the newest package of each name.
fetch() {
    mkdir -p "$folder/packages"
    # As root, apt would fetch as a user who may not write here.
    (cd "$folder/packages" && apt-get -qq -o APT::Sandbox::User=root "$@" >/dev/null 2>&1) || return 1
    for package in "$folder"/packages/*.deb; do
        dpkg -x "$package" "$folder/root"
    done
}

# With package lists of our own if the machine has none, or old ones that name packages which are gone.
private=""
if ! fetch download nginx; then
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    private="-o Dir::State::Lists=$folder/lists -o Dir::Cache=$folder/cache"
    # shellcheck disable=SC2086 # several words
    apt-get -qq -o APT::Sandbox::User=root $private update >/dev/null 2>&1 || fail "no package lists can be fetched: $remedy"
    # shellcheck disable=SC2086 # several words
    fetch $private download nginx || fail "nginx cannot be fetched: $remedy"
fi
program=$folder/root/usr/sbin/nginx
if ldd "$program" | grep -q 'not found'; then
    # shellcheck disable=SC2086 # several words
    fetch $private download libcrypt1 libpcre2-8-0 libssl3 zlib1g || fail "the libraries of nginx cannot be fetched: $remedy"
fi
libraries=$(find "$folder/root" -name 'lib*.so.*' -exec dirname {} + | sort -u | paste -sd:)
cat >"$folder/nginx" <<SCRIPT
#!/bin/sh
LD_LIBRARY_PATH='$libraries' exec '$program' "\$@"
SCRIPT
chmod +x "$folder/nginx"
rm -rf "$folder/packages" "$folder/lists" "$folder/cache"
"$folder/nginx" -v >/dev/null 2>&1 || fail "the fetched nginx does not start: $remedy"
