"""The image built by buildah without an engine, and its file system run as a container would be.

The base comes from debootstrap, once, into the cache: no registry of images is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.harness.cache import cache_dir, cache_lock

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
BASE_VERSION = "4"
"""Another number makes the bases anew."""

BASE_TIMEOUT_SECS = 1200

BUILD_PACKAGES = (
    "binutils",
    "ca-certificates",
    "gcc",
    "libc6-dev",
    "libpython3-dev",
    "python3",
    "python3-venv",
)
"""What `python:3.11-bookworm` has of what the Dockerfile's first stage uses."""

RUN_PACKAGES = ("ca-certificates", "netbase", "python3", "tzdata")
"""The slim image has these beside Debian's own."""

PIP_VARIABLES = ("cert", "index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "timeout")


def _run(argv: Sequence[str], timeout_secs: float = 600, cwd: Path | None = None) -> str:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_secs,
        cwd=cwd,
    )
    assert done.returncode == 0, f"{argv} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def bases() -> tuple[Path, Path]:
    """Root file systems of the two bases, for building and for running, made by the first who asks.

    Raises NoBaseError.
    """
    with cache_lock("image-base"):
        folder = cache_dir("image-base") / f"{SUITE}-{BASE_VERSION}"
        if not folder.exists():
            partial = cache_dir("image-base") / "partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _make_bases(partial / "build", partial / "run")
            partial.rename(folder)
    return folder / "build", folder / "run"


def _make_bases(build: Path, run: Path) -> None:
    packages = build.parent / "packages"
    packages.mkdir()
    for root, included in ((run, RUN_PACKAGES), (build, BUILD_PACKAGES)):
        argv = [
            "debootstrap",
            "--variant=minbase",
            f"--cache-dir={packages}",
            f"--include={','.join(included)}",
        ]
        try:
            _run([*argv, SUITE, str(root), *_mirror()], timeout_secs=BASE_TIMEOUT_SECS)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise NoBaseError(str(error)) from error
        # as the slim images have it
        slim = "rm -rf /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale"
        clean = "rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*"
        _run(["chroot", str(root), "/bin/sh", "-c", f"{slim} && {clean}"])
    shutil.rmtree(packages)


def _mirror() -> list[str]:
    """This machine's own source of Debian packages, if it says one."""
    for path in sorted(Path("/etc/apt").glob("sources.list*")) + sorted(
        Path("/etc/apt/sources.list.d").glob("*")
    ):
        if path.is_file():
            for word in path.read_text().split():
                if word.startswith(("http://", "https://")) and word.rstrip("/").endswith("/debian"):
                    return [word]
    return []


def pip_conf(folder: Path) -> tuple[Path, list[Path], Path | None]:
    """This machine's pip configuration as one file, the folders that it names, and its certificates."""
    lines, folders, certificate = ["[global]"], [], None
    listed = _run([sys.executable, "-m", "pip", "config", "list"])
    settings = dict(line.partition("=")[::2] for line in listed.splitlines() if "=" in line)
    # the environment's come last, since they are the stronger ones
    for name, quoted in sorted(settings.items(), key=lambda item: item[0].startswith(":env:")):
        key, value = name.rpartition(".")[2], quoted.strip("'\"")
        if key not in PIP_VARIABLES:
            continue
        if key == "cert":
            certificate, value = Path(value), "/run/secrets/ca.pem"
        folders += [Path(word) for word in value.split() if key == "find-links" and Path(word).is_dir()]
        lines = [line for line in lines if not line.startswith(f"{key} =")] + [f"{key} = {value}"]
    path = folder / "pip.conf"
    path.write_text("\n".join(lines) + "\n")
    return path, folders, certificate


class NoBaseError(Exception):
    """Debian's packages cannot be had: nothing can be said about the image."""


class Image:
    """Built in a storage of its own under `root`; `mount` is its file system, `config` its configuration."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._buildah = ["buildah", "--root", f"{root}/storage", "--runroot", f"{root}/run"]
        self._buildah += ["--storage-driver", "vfs"]
        self._context = ROOT

    def build(self) -> Self:
        """From the two bases and the Dockerfile."""
        for name, base in zip(("base-build", "base-run"), bases(), strict=True):
            container = self._do("from", "scratch").strip()
            self._do("copy", "-q", container, str(base), "/")
            self._do("commit", "-q", "--rm", container, f"localhost/{name}")
        config, folders, certificate = pip_conf(self._root)
        options = ["--secret", f"id=pip.conf,src={config}"]
        if certificate is not None:
            options += ["--secret", f"id=ca.pem,src={certificate}"]
        for folder in folders:
            options += ["--volume", f"{folder}:{folder}:ro"]
        self._do(
            "bud", "--isolation", "chroot", "--format", "docker", "--layers=false", "--pull-never",
            "--build-arg", "BUILD_IMAGE=localhost/base-build", "--build-arg", "BASE_IMAGE=localhost/base-run",
            "--build-arg", "REVISION=tested", *options, "--tag", "dfe-archiver", str(self._context),
        )  # fmt: skip
        container = self._do("from", "--pull-never", "dfe-archiver").strip()
        self.mount = Path(self._do("mount", container).strip())
        self.config: Mapping[str, Any] = json.loads(self._do("inspect", "--type", "image", "dfe-archiver"))[
            "Docker"
        ]["config"]
        return self

    def _do(self, *arguments: str) -> str:
        return _run([*self._buildah, *arguments], cwd=self._root)

    def files(self, below: str) -> set[str]:
        """Paths of the files under a folder of the image, relative to it."""
        folder = self.mount / below.lstrip("/")
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    def packed_bytes(self) -> int:
        """Its size as a registry holds it, a little more since it is packed faster."""
        argv = f"tar -C '{self.mount}' -cf - . | gzip -1 | wc -c"
        return int(_run(["bash", "-c", argv]))

    def unpacked_bytes(self) -> int:
        """Its size on a disk."""
        return int(_run(["du", "-sb", str(self.mount)]).split()[0])

    def command(
        self, arguments: Sequence[str] | None, env: Mapping[str, str], volumes: Mapping[Path, str]
    ) -> list[str]:
        """A command line that runs it as a container: PID 1 of a namespace, root read-only, its user.

        `arguments` stand in for its CMD; with None, for ENTRYPOINT and CMD the HEALTHCHECK is run.
        `volumes` are writable folders by where they are in the image.
        """
        if arguments is None:
            run = list(self.config["Healthcheck"]["Test"][1:])
        else:
            run = [*self.config["Entrypoint"], *(arguments or self.config["Cmd"])]
        image_env = dict(entry.split("=", 1) for entry in self.config["Env"])
        script = ["set -e", "mount --make-rprivate /"]
        script += [f"mount --bind {self.mount} {self.mount}"]
        script += [f"mount --bind {folder} {self.mount}{target}" for folder, target in volumes.items()]
        script += [f"mount -t proc proc {self.mount}/proc", f"mount --rbind /dev {self.mount}/dev"]
        script += [f"mount -o remount,ro,bind {self.mount}", f"cd {self.mount}"]
        words = [f"{name}={value}" for name, value in {**image_env, **env}.items()]
        user, group = self.config["User"].split(":")
        script += [
            "exec env -i "
            + " ".join(f"'{word}'" for word in words)
            + f" {shutil.which('chroot')} --userspec={user}:{group} --groups={group} {self.mount} "
            + " ".join(f"'{word}'" for word in run)
        ]
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", "\n".join(script)]

    def __enter__(self) -> Self:
        return self.build()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError):
            self._do("rm", "--all")
            self._do("rmi", "--all", "--force")
        shutil.rmtree(self._root, ignore_errors=True)


def may_build() -> str | None:
    """Why an image cannot be built here; None where it can."""
    if os.geteuid() != 0:
        return "debootstrap and chroot need root"
    missing = [name for name in ("buildah", "debootstrap", "unshare") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def built(root: Path) -> Iterator[Image]:
    """The image, for as long as the block lasts."""
    with Image(root) as image:
        yield image
