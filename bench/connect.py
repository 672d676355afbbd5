"""Kafka Connect's jars, fetched once by Maven into the cache of the tests' downloads."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path

from tests.harness.cache import cache_dir, cache_lock
from tests.harness.kafka import KAFKA_VERSION

_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>bench</groupId>
  <artifactId>connect-libs</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>connect-runtime</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>connect-file</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>2.24.3</version>
    </dependency>
  </dependencies>
</project>
"""


def connect_libs() -> Path:
    """The folder of the jars of Connect's runtime and its file connectors."""
    libs = cache_dir() / f"connect-{KAFKA_VERSION}" / "libs"
    with cache_lock("connect"):
        if libs.is_dir():
            return libs
        partial = cache_dir(f"connect-{KAFKA_VERSION}", f"partial-{uuid.uuid4().hex}")
        (partial / "pom.xml").write_text(_POM)
        subprocess.run(
            ["mvn", "-q", "-B", "-f", str(partial / "pom.xml"), "dependency:copy-dependencies"]
            + [f"-DoutputDirectory={partial / 'libs'}", "-DincludeScope=runtime"],
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=600,
        )
        (partial / "libs").rename(libs)
        shutil.rmtree(partial)
    return libs
