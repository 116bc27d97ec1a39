#!/usr/bin/env bash
# Run the README's two commands and the unit tests in a fresh Debian that has only the packages which the README names.
#
#     sudo bash tests/fresh_machine.sh [FOLDER]
#
# As root, with debootstrap installed. FOLDER keeps the Debian for another run; by default, it is deleted at the end.
# RELEASE names another Debian than trixie (13), TEST_PROCESSES the number of processes of the tests. Variables of pip
# (such as PIP_EXTRA_INDEX_URL for the CPU build of PyTorch), and certificates of this machine, are used there too.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
root=${1:-$(mktemp -d)}
mirror=$(grep -rhoE 'https?://[^ ]+/debian/?$' /etc/apt/sources.list* 2> /dev/null | head -n 1 || true)

clean_up() {
    for folder in proc sys dev/pts dev/shm dev; do
        ! mountpoint -q "$root/$folder" || umount --lazy "$root/$folder"  # a last process of the tests may still use it
    done
    [[ -n ${kept:-} ]] || rm -rf --one-file-system "$root"
}
kept=${1:-}
trap clean_up EXIT

if [[ ! -x $root/usr/bin/git ]]; then
    echo "Installing Debian ${RELEASE:-trixie} into $root: some minutes"
    debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,make,gcc,g++,git,ca-certificates \
        "${RELEASE:-trixie}" "$root" "${mirror:-http://deb.debian.org/debian}" > "$root.log" || { tail "$root.log"; exit 1; }
fi
chmod 755 "$root"  # mktemp makes a folder that only its owner can enter
cp -L --remove-destination /etc/resolv.conf "$root/etc/"
cp --remove-destination /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
[[ ! -f /etc/pip.conf ]] || cp /etc/pip.conf "$root/etc/"
for folder in proc sys dev dev/pts dev/shm; do
    mountpoint -q "$root/$folder" || mount --bind "/$folder" "$root/$folder"
done
chroot "$root" sh -c 'id me > /dev/null 2>&1 || useradd --create-home --shell /bin/bash me'
rm -rf "$root/home/me/dj2mgm"
git clone --quiet --no-hardlinks "$project" "$root/home/me/dj2mgm"
chroot "$root" chown -R me /home/me/dj2mgm

mapfile -t passed < <(env | grep -E '^(PIP_[A-Z_]+|SSL_CERT_FILE|SSL_CERT_DIR|https?_proxy)=' || true)

# Run a command as a new user would, and print how long it took.
try() {
    echo "\$ $1"
    local start=$SECONDS
    chroot --userspec=me "$root" env -i "${passed[@]}" PATH=/usr/bin:/bin HOME=/home/me USER=me LANG=C.UTF-8 \
        bash -c "cd ~/dj2mgm && $1"
    echo "took $(((SECONDS - start) / 60)) min $(((SECONDS - start) % 60)) s"
}
try "make baseline"
try "source .venv/bin/activate && snakemake --cores 1 dj_synth"
try "test -s results/shapes/tiny/report/report.html"
try "source .venv/bin/activate && python -m pytest tests/unit --quiet --numprocesses ${TEST_PROCESSES:-2}"
