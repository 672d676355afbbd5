#!/bin/sh
# Takes out of a Debian with Python what a process that runs as nobody in particular never uses, in place.
# docs/decisions/0030 says what each part weighs. Packages are removed by dpkg, so that its list, which
# scanners read, stays true; a base that has some of them not is fine.
set -eu

purge() {
    # a word that matches no package is an error of dpkg-query's, and none of ours
    names=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "$@" 2> /dev/null | sed -n 's/^ii *//p')
    [ -n "$names" ] || return 0
    # shellcheck disable=SC2086 # one word a package
    dpkg --purge --force-all $names > /tmp/purge.log 2>&1 || { cat /tmp/purge.log; return 1; }
}

# what installs packages, makes users and file systems, logs in, and looks after a machine
purge adduser apt bsdutils debian-archive-keyring e2fsprogs gpgv login logsave mount ncurses-bin passwd \
    sysvinit-utils util-linux util-linux-extra
# what only these used
purge libapt-pkg6.0 libblkid1 libext2fs2 libfdisk1 libgnutls30 libhogweed6 libidn2-0 libmount1 libnettle8 \
    libp11-kit0 libpam-modules libpam-modules-bin libpam-runtime libpam0g libseccomp2 libsemanage-common \
    libsemanage2 libsepol2 libsmartcols1 libss2 libtasn1-6 libunistring2
# last, since the packages above run these as they go
purge debconf init-system-helpers perl-base

rm -rf /etc/apt /usr/lib/*/gconv /usr/share/bash-completion /usr/share/doc /usr/share/gcc /usr/share/info \
    /usr/share/lintian /usr/share/locale /usr/share/man /usr/share/perl5 /var/cache/* /var/lib/apt \
    /var/log/* /tmp/purge.log

stdlib=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for name in ensurepip idlelib lib2to3 pydoc_data test tkinter turtledemo; do
    rm -rf "${stdlib:?}/$name"
done
for name in pip setuptools wheel pkg_resources _distutils_hack; do
    rm -rf "${site:?}/$name" "$site/$name"-*.dist-info
done
rm -f "$site/distutils-precedence.pth" /usr/local/bin/pip* /usr/local/bin/idle* /usr/local/bin/2to3* \
    /usr/local/bin/wheel
# some bases come with their modules not compiled
python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash "$stdlib"
