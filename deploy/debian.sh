# For install.sh of programs that Debian has: unpacks its packages without installing them. To be sourced, with `folder`
# (absolute) and `remedy` set.

fail() {
    echo "fairlane: $*" >&2
    exit 1
}

# With package lists of our own if the machine has none, or old ones that name packages which are gone.
private=""

# Unpack the newest package of each name below $folder/root.
unpack() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || fail "there is no Debian to fetch $1 from: $remedy"
    download "$@" || if [ -z "$private" ]; then
        mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
        private="-o Dir::State::Lists=$folder/lists -o Dir::Cache=$folder/cache"
        # shellcheck disable=SC2086 # several words
        apt-get -qq -o APT::Sandbox::User=root $private update >/dev/null 2>&1 || fail "no package lists can be fetched: $remedy"
        download "$@"
    fi || fail "$1 cannot be fetched: $remedy"
    for package in "$folder"/packages/*.deb; do
        dpkg -x "$package" "$folder/root"
    done
    rm -rf "$folder/packages"
}

download() {
    mkdir -p "$folder/packages"
    # As root, apt would fetch as a user who may not write here.
    # shellcheck disable=SC2086 # several words
    (cd "$folder/packages" && apt-get -qq -o APT::Sandbox::User=root $private download "$@" >/dev/null 2>&1)
}

tidy() {
    rm -rf "$folder/packages" "$folder/lists" "$folder/cache"
}
