"""Whether the image has all that the archiver can be told to use: run at the end of its build, and by a test.

What an SDK imports only when it is used is used here, so that a build which left out too much ends with
an error, and no running archiver does. The last line says what the image weighs.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import ssl
import sys
import sysconfig
from pathlib import Path

import archiver

NOT_FILES = ("proc", "sys", "dev", "run")
NOT_USED = ("_ctypes_test", "_test", "_tkinter", "xx")
"""How names of Python's own begin that only its tests and windows use."""
SERVICES = ("s3", "sts", "sso", "sso-oidc")


def modules() -> int:
    """Every module of ours, and every one of Python's own that loads a library."""
    names = [module.name for module in pkgutil.walk_packages(archiver.__path__, "archiver.")]
    names = [name for name in names if not name.endswith("__main__")]
    compiled = Path(sysconfig.get_path("platstdlib")) / "lib-dynload"
    libraries = sorted(path.name.split(".")[0] for path in compiled.glob("*.so"))
    names += [name for name in libraries if not name.startswith(NOT_USED)]
    for name in names:
        importlib.import_module(name)
    return len(names)


def compiled_part() -> None:
    """Without it the archiver works, slower: no image should."""
    from archiver.native import native

    assert native is not None, "the first stage needs a C compiler and Python's headers"


def codecs() -> None:
    """One frame of each."""
    from archiver.codecs import CODECS

    for codec in CODECS.values():
        assert codec.compressor().frame([b"x"]), codec


def clients() -> None:
    """One client of each SDK, with credentials that open nothing."""
    import boto3
    import grpc
    from azure.identity import DefaultAzureCredential
    from azure.storage.blob import BlobServiceClient
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.storage import Client

    for service in SERVICES:
        boto3.client(service, region_name="eu-central-1", aws_access_key_id="a", aws_secret_access_key="b")
    BlobServiceClient("https://nobody.blob.core.windows.net", credential=DefaultAzureCredential())
    Client(project="nobody", credentials=AnonymousCredentials())
    login = {"security.protocol": "sasl_ssl", "sasl.mechanism": "SCRAM-SHA-512"}
    login |= {"sasl.username": "nobody", "sasl.password": "x"}
    AdminClient({**login, "bootstrap.servers": ""})
    Consumer({**login, "bootstrap.servers": "", "group.id": "nobody"}).close()
    grpc.insecure_channel("127.0.0.1:1").close()


def certificates() -> int:
    """Of the authorities that the system trusts."""
    trusted = ssl.create_default_context().cert_store_stats()["x509_ca"]
    assert trusted, "no certificate of an authority: the base needs ca-certificates"
    return trusted


def weight() -> int:
    """Bytes of all files."""
    total = 0
    for folder, folders, files in os.walk("/"):
        if folder == "/":
            folders[:] = [name for name in folders if name not in NOT_FILES]
        total += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
    return total


def main() -> None:
    """Ends with an error where something is missing."""
    imported = modules()
    compiled_part()
    codecs()
    clients()
    print(f"complete: {imported} modules, {certificates()} authorities, Python {sys.version.split()[0]}")
    print(f"unpacked: {weight() / 1e6:.0f} MB")


main()
