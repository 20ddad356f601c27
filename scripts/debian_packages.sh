#!/bin/sh
# Installs Debian packages that tests want, where that is possible: debian_packages.sh package=program ...
#
# A package whose program is there counts as installed. Without apt-get or without root nothing is done: the
# tests that need the program are then skipped and counted (KSANA_TEST_STRICT=1 makes them fail instead).
set -eu

missing=
for entry in "$@"; do
    command -v "${entry#*=}" >/dev/null 2>&1 || missing="$missing ${entry%%=*}"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "ksana: tests that need these Debian packages will be skipped:$missing" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
# shellcheck disable=SC2086 - one argument for each package
apt-get -q install --yes --no-install-recommends $missing
