"""The image: what is in it, what it weighs, and that it archives as a container would run it."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from archiver import __version__
from tests.harness.archive import compare, read_objects
from tests.harness.image import ROOT, Image, NoBaseError, built, may_build
from tests.harness.kafka import KafkaServer
from tests.harness.process import Server, free_port
from tests.harness.seaweed import SeaweedFS

UNPACKED_BYTES_MAX = 200_000_000
SITE_PACKAGES = "/opt/dfe-archiver/lib/python3.11/site-packages"
SPOOL = "/var/spool/dfe-archiver"
USER = 10001


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Built once; the bases it stands on are kept between sessions."""
    if reason := may_build():
        pytest.skip(reason)
    try:
        with built(tmp_path_factory.mktemp("image") / "buildah") as image:
            yield image
    except NoBaseError as error:
        pytest.skip(f"no base for the image: {str(error)[-500:]}")


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run(
        [str(program), "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_file_that_the_archiver_needs_is_in_it(image: Image) -> None:
    """All of the package but what git does not have; each module compiled, as is every other one."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "archiver"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wanted = {
        path.removeprefix("archiver/")
        for path in tracked
        if path.endswith((".py", ".html", ".proto", "py.typed")) and (ROOT / path).exists()
    }
    assert {"cli.py", "sources/wire/transport.proto"} <= wanted
    have = image.files(f"{SITE_PACKAGES}/archiver")
    assert wanted - have == set()

    everything = image.files(SITE_PACKAGES)
    compiled = {path.replace("__pycache__/", "").replace(".cpython-311.pyc", ".py") for path in everything}
    not_compiled = {path for path in wanted if path.endswith(".py") and f"archiver/{path}" not in compiled}
    assert not_compiled == set()


def test_nothing_is_in_it_that_it_does_not_need(image: Image) -> None:
    """No compiler, no installer, no secret of the build, nothing of the repository beside the package."""
    programs = image.files("/usr/bin") | image.files("/usr/local/bin") | image.files("/opt/dfe-archiver/bin")
    unwanted = ("cc", "gcc", "g++", "ld", "as", "make", "pip", "pip3", "apt", "perl", "su", "mount")
    # with the machine's own name before it, too: x86_64-linux-gnu-as
    names = {Path(path).name.rpartition("-gnu-")[2] for path in programs}
    assert not set(unwanted) & names
    assert not (image.mount / "src").exists() and not (image.mount / "run" / "secrets").exists()
    packages = {path.split("/")[0] for path in image.files(SITE_PACKAGES)}
    assert not {"pip", "setuptools", "tests", "pytest", "moto", "mypy", "rich", "pygments"} & packages
    assert image.files(SPOOL) == set()


def test_it_is_small(image: Image) -> None:
    """On a disk, which is the larger number; and as a registry holds it and a node fetches it."""
    packed, unpacked = image.packed_bytes(), image.unpacked_bytes()
    print(f"image: {packed / 1e6:.0f} MB packed, {unpacked / 1e6:.0f} MB unpacked")
    assert unpacked < UNPACKED_BYTES_MAX
    assert packed < unpacked / 2


def test_its_configuration_says_who_it_is_and_how_it_stops(image: Image) -> None:
    config = image.config
    assert config["User"] == f"{USER}:{USER}"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["/opt/dfe-archiver/bin/dfe-archiver"]
    assert config["Cmd"] == ["run"]
    assert set(config["Volumes"]) == {SPOOL}
    assert set(config["ExposedPorts"]) == {"9090/tcp", "50051/tcp"}
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert labels["version"] == __version__
    assert labels["revision"] == "tested"
    assert labels["base.name"] == "localhost/base-run"
    assert labels["licenses"] == "Apache-2.0"
    assert not [entry for entry in config["Env"] if entry.startswith("PIP_")]


def test_it_owns_its_spool_and_nothing_else(image: Image) -> None:
    found = subprocess.run(
        ["find", str(image.mount), "-xdev", "(", "-uid", str(USER), "-o", "-gid", str(USER), ")"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == [f"{image.mount}{SPOOL}"]


def run_in(image: Image, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Another program in it, as its user, with its read-only root."""
    command = image.command([], {}, {})
    entry = "/opt/dfe-archiver/bin/dfe-archiver' 'run"
    assert entry in command[-1]
    command[-1] = command[-1].replace(entry, "' '".join([program, *arguments]))
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_every_store_source_and_codec_is_there(image: Image) -> None:
    """What is imported only when it is used, too, with the SDKs' descriptions that were kept, and the
    authorities that TLS trusts. Its build has asked the same, or there would be no image."""
    done = run_in(image, "/opt/dfe-archiver/bin/python", "/opt/dfe-archiver/complete.py")
    assert done.stdout.startswith("complete: "), done.stdout + done.stderr
    assert done.returncode == 0


def test_what_was_left_out_is_missed_by_the_check_of_the_build(image: Image, tmp_path: Path) -> None:
    """A check that finds nothing is none: without a module of one SDK it ends with an error."""
    hidden = tmp_path / "nothing"
    hidden.mkdir()
    command = image.command([], {}, {hidden: f"{SITE_PACKAGES}/azure/storage"})
    entry = "/opt/dfe-archiver/bin/dfe-archiver' 'run"
    command[-1] = command[-1].replace(entry, "/opt/dfe-archiver/bin/python' '/opt/dfe-archiver/complete.py")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "azure.storage" in done.stderr


def test_what_an_operator_looks_with_is_there(image: Image) -> None:
    """A shell with the usual tools; and dpkg's list says what is in it, to those who scan images."""
    done = run_in(image, "/bin/bash", "-c", "ls /var/spool/dfe-archiver && df / | tail -n 1 | grep -c /")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    listed = (image.mount / "var" / "lib" / "dpkg" / "status").read_text()
    packages = {line.split()[1] for line in listed.splitlines() if line.startswith("Package: ")}
    assert {"libc6", "libssl3", "ca-certificates"} <= packages
    assert not {"apt", "perl-base", "passwd", "gcc-12"} & packages


def test_it_archives_with_a_read_only_root_and_stops_as_process_one(
    image: Image, kafka: KafkaServer, tmp_path: Path, log_dir: Path
) -> None:
    """[D6], [O2]: real Kafka, a real store, bytes compared, HEALTHCHECK before and after, status 0."""
    kafka.create_topic("image-events", 2)
    expected = {
        f"image-events/org-{org}": [f'{{"_org_id":"org-{org}","n":{n}}}'.encode() for n in range(500)]
        for org in range(3)
    }
    for values in expected.values():
        kafka.produce("image-events", values)
    spool = tmp_path / "spool"
    spool.mkdir()
    subprocess.run(["chown", f"{USER}:{USER}", str(spool)], check=True)
    with SeaweedFS(log_dir, tmp_path / "s3") as store:
        store.create_bucket("image")
        port = free_port()
        env = {
            "KAFKA_BROKERS": kafka.bootstrap,
            "KAFKA_TOPICS": "image-events",
            "KAFKA_GROUP_ID": "image",
            "DFE_ARCHIVER_DESTINATION": "s3://image/archive",
            "DFE_ARCHIVER_ARCHIVE__ROLL_INTERVAL_SECS": "3600",
            "DFE_ARCHIVER_BUFFER__MIN_FREE_DISK_BYTES": "64MiB",
            "S3_ENDPOINT": store.endpoint,
            "S3_ACCESS_KEY_ID": store.access_key_id,
            "S3_SECRET_ACCESS_KEY": store.secret_access_key,
            "METRICS_ADDR": f"127.0.0.1:{port}",
        }
        check = subprocess.run(
            image.command(["check"], env, {spool: SPOOL}), capture_output=True, text=True, timeout=60
        )
        assert check.returncode == 0, check.stdout + check.stderr
        health = image.command(None, env, {})
        assert subprocess.run(health, capture_output=True, timeout=300).returncode == 1

        def taken() -> bool:
            text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
            return "\ndfe_archiver_records_consumed_total 1500.0\n" in text

        with Server("image", image.command([], env, {spool: SPOOL}), log_dir, ready=taken) as server:
            done = subprocess.run(health, capture_output=True, text=True, timeout=300)
            assert (done.returncode, done.stdout) == (0, "alive\n")
            inside = _process_one(server)
            assert inside["user"] == str(USER)
            assert server.stop(90) == 0, server.tail()
        # nothing has rolled: what is there was flushed, sealed and uploaded by the stop
        objects = {
            key.removeprefix("archive/"): store.read("image", key) or b""
            for key in store.keys("image", "archive/")
        }
        assert compare(expected, read_objects(objects)).exact
    assert kafka.committed("image", "image-events") == kafka.end_offsets("image-events")
    log = [json.loads(line) for line in server.output().splitlines()]
    assert log[-1]["event"] == "stopped"


def _process_one(server: Server) -> dict[str, str]:
    """The archiver as the kernel sees it: it is process 1 of its namespace."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if fields["PPid"].strip() == str(server.pid):
            assert fields["NSpid"].split()[-1] == "1"
            return {"user": fields["Uid"].split()[1]}
    raise AssertionError("the archiver is not there")


def test_an_early_end_is_told_with_its_status(image: Image) -> None:
    """[C4]: a wrong configuration ends with 2 and says why."""
    command = image.command([], {"DFE_ARCHIVER_DESTINATION": "ftp://x"}, {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "archive.destination" in done.stderr
