# SPDX-License-Identifier: Apache-2.0
# Minimal roots of Debian in ${XDG_CACHE_HOME:-~/.cache}/ndtrain, made by debootstrap from the mirror that this machine's apt uses
# (ND_DEBIAN_MIRROR=URL names another), and kept. Scripts read this file. Making and entering one needs root and mounts of its
# own (unshare --mount); making one needs a network.
roots=${XDG_CACHE_HOME:-$HOME/.cache}/ndtrain

# Runs a command in the root FOLDER with its own mounts and processes, all of which end with it. Below a mere chroot the kernel
# allows no namespaces of users, and tests that make some say so; so the folder becomes the root of all mounts where it can.
# ROOT_BOUND names a folder that is there too, to be read; with ROOT_ALONE=1 there is no network.
in_root() { # folder, command...
    unshare --mount --pid --fork --kill-child ${ROOT_ALONE:+--net} -- sh -ec '
        mount --rbind "$1" "$1"
        if [ -n "$2" ]; then
            mkdir -p "$1$2"
            mount --bind "$2" "$1$2"
            mount -o remount,bind,ro "$1$2"
        fi
        cd "$1"
        shift 2
        mount --rbind /dev dev
        mount --rbind /sys sys
        mount -t proc proc proc
        mount -t tmpfs tmpfs run
        if pivot_root . . 2>/dev/null; then
            umount -l .
        fi
        exec chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"
    ' in_root "$1" "${ROOT_BOUND:-}" "${@:2}"
}

# The mirror of Debian, not that of its security updates, in the sources of this machine's apt.
mirror() {
    if [ -n "${ND_DEBIAN_MIRROR:-}" ]; then
        echo "$ND_DEBIAN_MIRROR"
    else
        apt-get indextargets --format '$(ORIGIN) $(RELEASE) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
            awk '$1 == "Debian" && $2 !~ /-/ && !found { print $3; found = 1 }'
    fi
}

# A new root in the place of the old one, which stays where none can be had; `why` then says the reason.
make_root() { # root, release, packages (with commas)
    local from new=$1.new
    why=
    if ! command -v debootstrap >/dev/null; then
        why='debootstrap is not installed; scripts/setup --tests installs it'
        return 1
    fi
    from=$(mirror)
    if [ -z "$from" ]; then
        why="this machine's apt has no source of Debian; name a mirror in ND_DEBIAN_MIRROR"
        return 1
    fi
    rm -rf "$new"
    echo "making a root of $2 in $1"
    if ! debootstrap --variant=minbase --include="$3" "$2" "$new" "$from" >"$1.log" 2>&1; then
        tail -n 5 "$1.log" >&2
        rm -rf "$new"
        why="debootstrap could not fetch $2 from this machine's mirror ($1.log)"
        return 1
    fi
    printf '#!/bin/sh\nexit 101\n' >"$new/usr/sbin/policy-rc.d" # no service is started by its installation
    chmod 755 "$new/usr/sbin/policy-rc.d"
    rm -rf "$1.made" "$1"
    mv "$new" "$1"
    touch "$1.made"
}
