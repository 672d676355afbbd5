"""A real Apache Kafka broker (KRaft, one process) and what tests ask of it."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import (
    ConsumerGroupState,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
)
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tests.harness.cache import cache_dir, cache_lock
from tests.harness.process import Server, ServerError, free_port, port_open, wait_until

KAFKA_VERSION = "4.1.0"
NO_COORDINATOR_YET = frozenset(
    {
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    }
)
ADMIN_TIMEOUT_SECS = 60

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>harness</groupId>
  <artifactId>kafka-libs</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
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

LOGGING = """<Configuration status="ERROR">
  <Appenders>
    <Console name="out"><PatternLayout pattern="%d{HH:mm:ss.SSS} %p %c{1} %m%n"/></Console>
  </Appenders>
  <Loggers>
    <Root level="WARN"><AppenderRef ref="out"/></Root>
    <Logger name="org.apache.kafka.coordinator.group" level="INFO"/>
  </Loggers>
</Configuration>
"""

QUICK_RETURN = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "300"}
"""Properties of one that is killed: it comes back as soon as its old registration has run out."""

PROPERTIES = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "inter.broker.listener.name": "PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "num.io.threads": "2",
    "num.network.threads": "2",
    # a topic that the archiver would create by asking for it must not appear
    "auto.create.topics.enable": "false",
    "message.max.bytes": str(32 * 1024 * 1024),
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.coordinator.rebalance.protocols": "classic,consumer",
    "group.initial.rebalance.delay.ms": "0",
    # short sessions, so that tests of frozen members need not wait for 45 s
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "1000",
    # a broker that a busy machine leaves no time loses the leadership of everything for a moment
    "broker.session.timeout.ms": "20000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.backoff.ms": "500",
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "1000",
}


def kafka_libs() -> Path:
    """The folder of Apache Kafka's jars, fetched once by Maven into the cache."""
    libs = cache_dir() / f"kafka-{KAFKA_VERSION}" / "libs"
    with cache_lock("kafka"):
        if libs.is_dir():
            return libs
        partial = cache_dir(f"kafka-{KAFKA_VERSION}", f"partial-{uuid.uuid4().hex}")
        pom = partial / "pom.xml"
        pom.write_text(POM)
        _run(
            ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
            + [f"-DoutputDirectory={partial / 'libs'}", "-DincludeScope=runtime"],
            timeout_secs=600,
        )
        (partial / "libs").rename(libs)
        shutil.rmtree(partial)
    return libs


def _run(argv: list[str], timeout_secs: float = 300, cwd: Path | None = None) -> str:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_secs, cwd=cwd
    )
    if done.returncode != 0:
        raise ServerError(f"{argv} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class SecureListener:
    """How a client reaches the SASL_SSL listener. Mechanisms: SCRAM-SHA-512, SCRAM-SHA-256, PLAIN."""

    bootstrap: str
    ca_location: Path
    user: str
    password: str

    def client_config(self, mechanism: str = "SCRAM-SHA-512") -> dict[str, str]:
        """librdkafka properties."""
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.username": self.user,
            "sasl.password": self.password,
            "ssl.ca.location": str(self.ca_location),
        }


class KafkaServer:
    """One broker on 127.0.0.1 with its data under `root`; ports and data stay over restarts.

    `secure=True` adds a SASL_SSL listener (`secure_listener`). `advertised_port` is what clients are
    told to connect to, for a proxy in between; `properties` override the broker's properties. One that is
    `short_lived` is compiled with less effort: it starts sooner, takes less of the processor, and is slower.
    """

    def __init__(
        self,
        root: Path,
        log_dir: Path,
        *,
        name: str = "kafka",
        secure: bool = False,
        advertised_port: int | None = None,
        properties: Mapping[str, str] | None = None,
        short_lived: bool = False,
    ) -> None:
        self.root = root
        self.port = free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self.secure_listener: SecureListener | None = None
        self._admin: AdminClient | None = None
        self._formatted = False
        self._config = {**PROPERTIES, **self._listeners(secure, advertised_port), **(properties or {})}
        self.server = Server(
            name,
            [
                "java",
                "-Xms256m",
                "-Xmx1g",
                "-XX:+UseSerialGC",
                f"-Dlog4j2.configurationFile={root}/log4j2.xml",
            ]
            + ["-XX:TieredStopAtLevel=1"] * short_lived
            + ["-cp", f"{kafka_libs()}/*", "kafka.Kafka", str(root / "server.properties")],
            log_dir,
            ready=self._answers,
            ready_timeout_secs=60,
        )

    def _listeners(self, secure: bool, advertised_port: int | None) -> dict[str, str]:
        controller = free_port()
        listen = [f"PLAINTEXT://127.0.0.1:{self.port}", f"CONTROLLER://127.0.0.1:{controller}"]
        advertise = [f"PLAINTEXT://127.0.0.1:{advertised_port or self.port}"]
        protocols = ["PLAINTEXT:PLAINTEXT", "CONTROLLER:PLAINTEXT"]
        extra: dict[str, str] = {}
        if secure:
            port = free_port()
            listen.append(f"SASL_SSL://127.0.0.1:{port}")
            advertise.append(f"SASL_SSL://127.0.0.1:{port}")
            protocols.append("SASL_SSL:SASL_SSL")
            ca = self.root / "tls" / "ca.pem"
            self.secure_listener = SecureListener(
                f"127.0.0.1:{port}", ca, "archiver", f"pw-{uuid.uuid4().hex}"
            )
            extra = self._sasl_properties(self.secure_listener)
        return {
            "listeners": ",".join(listen),
            "advertised.listeners": ",".join(advertise),
            "listener.security.protocol.map": ",".join(protocols),
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "log.dirs": str(self.root / "data"),
            **extra,
        }

    def _sasl_properties(self, access: SecureListener) -> dict[str, str]:
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        plain = (
            "org.apache.kafka.common.security.plain.PlainLoginModule required "
            f'user_{access.user}="{access.password}";'
        )
        listener = "listener.name.sasl_ssl"
        return {
            # whoever comes in by the plain listener may do anything; rules are for the user of the other one
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "allow.everyone.if.no.acl.found": "true",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,PLAIN",
            f"{listener}.scram-sha-512.sasl.jaas.config": scram,
            f"{listener}.scram-sha-256.sasl.jaas.config": scram,
            f"{listener}.plain.sasl.jaas.config": plain,
            f"{listener}.ssl.keystore.type": "PEM",
            f"{listener}.ssl.keystore.location": str(self.root / "tls" / "server.pem"),
        }

    # --- the process -------------------------------------------------------------------------

    def start(self) -> Self:
        """Format the data directory the first time, start, wait until the broker answers."""
        if not self._formatted:
            self._format()
            self._formatted = True
        self.server.start()
        return self

    def _format(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "log4j2.xml").write_text(LOGGING)
        properties = self.root / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in self._config.items()))
        # Kafka refuses ids that begin with a dash
        cluster_id = "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        scram: list[str] = []
        if self.secure_listener is not None:
            make_certificates(self.root / "tls")
            user, password = self.secure_listener.user, self.secure_listener.password
            for mechanism in ("SCRAM-SHA-512", "SCRAM-SHA-256"):
                scram += ["--add-scram", f"{mechanism}=[name={user},password={password}]"]
        _run(
            ["java", "-XX:TieredStopAtLevel=1", f"-Dlog4j2.configurationFile={self.root}/log4j2.xml"]
            + ["-cp", f"{kafka_libs()}/*", "kafka.tools.StorageTool", "format"]
            + ["-t", cluster_id, "-c", str(properties), *scram]
        )

    def _answers(self) -> bool:
        if not port_open(self.port):
            return False
        try:
            return bool(self.admin.list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def kill(self) -> None:
        """SIGKILL; `start` brings it back with its data."""
        self.server.kill()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self.server.freeze()

    def thaw(self) -> None:
        """Undo `freeze`."""
        self.server.thaw()

    def __enter__(self) -> Self:
        return self if self.server.running else self.start()

    def __exit__(self, *_: object) -> None:
        self.server.kill()

    # --- what tests ask of it ----------------------------------------------------------------

    @property
    def admin(self) -> AdminClient:
        """One client for the life of the server: its futures die with it."""
        if self._admin is None:
            self._admin = AdminClient(
                {"bootstrap.servers": self.bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 200}
            )
        return self._admin

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic and wait until every partition has a leader."""
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {}))

        def created() -> bool:
            try:
                self.admin.create_topics([topic])[name].result(ADMIN_TIMEOUT_SECS)
            except KafkaException as error:
                # a broker that stood still does not count for a moment
                if error.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR:
                    return False
                raise
            return True

        wait_until(created, ADMIN_TIMEOUT_SECS, f"room for topic {name}")
        wait_until(lambda: len(self._partitions(name)) == partitions, ADMIN_TIMEOUT_SECS, f"topic {name}")

    def topic_names(self) -> set[str]:
        """All topics that exist."""
        return set(self.admin.list_topics(timeout=ADMIN_TIMEOUT_SECS).topics)

    def set_topic_config(self, name: str, key: str, value: str) -> None:
        """Change one setting of a topic."""
        entry = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
        for done in self.admin.incremental_alter_configs([resource]).values():
            done.result(ADMIN_TIMEOUT_SECS)

    def add_partitions(self, name: str, total: int) -> None:
        """Give a topic more partitions, `total` in all, and wait until each has a leader."""
        self.admin.create_partitions([NewPartitions(name, total)])[name].result(ADMIN_TIMEOUT_SECS)
        wait_until(lambda: len(self._partitions(name)) == total, ADMIN_TIMEOUT_SECS, f"partitions of {name}")

    def delete_topic(self, name: str) -> None:
        """Delete a topic, and the groups' commits with it, and wait until the broker has forgotten it."""
        self.admin.delete_topics([name])[name].result(ADMIN_TIMEOUT_SECS)
        wait_until(lambda: not self._partitions(name), ADMIN_TIMEOUT_SECS, f"deletion of {name}")

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Per partition, delete the records below an offset: the log start moves there."""
        wanted = [KafkaPartition(topic, partition, offset) for partition, offset in before.items()]
        for future in self.admin.delete_records(wanted).values():
            future.result(ADMIN_TIMEOUT_SECS)

    def delete_group(self, group: str) -> None:
        """Delete a group without members, and its commits; waits for members that are still leaving."""

        def deleted() -> bool:
            try:
                self.admin.delete_consumer_groups([group])[group].result(ADMIN_TIMEOUT_SECS)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                    return True
                if error.args[0].code() == KafkaError.NON_EMPTY_GROUP:
                    return False
                raise
            return True

        wait_until(deleted, ADMIN_TIMEOUT_SECS, f"deletion of group {group}")

    def topic_id(self, topic: str) -> str:
        """The id that tells a topic from an earlier one of the same name."""
        described = self.admin.describe_topics(TopicCollection([topic]))[topic].result(ADMIN_TIMEOUT_SECS)
        return str(described.topic_id)

    def group_members(self, group: str) -> int:
        """Members of a group that is stable; 0 while it rebalances, is empty or does not exist."""
        try:
            described = self.admin.describe_consumer_groups([group])[group].result(ADMIN_TIMEOUT_SECS)
        except KafkaException:
            return 0
        return len(described.members) if described.state == ConsumerGroupState.STABLE else 0

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Committed offset per partition; partitions without a commit are absent.

        Asked through a consumer that never subscribes: the admin client's call for it can crash the
        process while the coordinator is loading.
        """
        consumer = KafkaConsumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": group,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        try:
            wanted = [KafkaPartition(topic, partition) for partition in self._partitions(topic)]
            answers = _once_there_is_a_coordinator(consumer, wanted) if wanted else []
        finally:
            consumer.close()
        return {answer.partition: answer.offset for answer in answers if answer.offset >= 0}

    def end_offsets(self, topic: str, *, stable: bool = False) -> dict[int, int]:
        """Per partition, the offset that the next record gets; `stable`: the last stable offset."""
        level = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(topic, OffsetSpec.latest(), level)

    def log_starts(self, topic: str) -> dict[int, int]:
        """Per partition, the first offset that the broker still has."""
        return self._offsets(topic, OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)

    def lag(self, group: str, topic: str) -> int:
        """Records (with gaps) of all partitions that the group has not committed."""
        committed = self.committed(group, topic)
        return sum(end - committed.get(partition, 0) for partition, end in self.end_offsets(topic).items())

    def _offsets(self, topic: str, spec: OffsetSpec, level: IsolationLevel) -> dict[int, int]:
        wanted = {KafkaPartition(topic, partition): spec for partition in self._partitions(topic)}
        if not wanted:
            return {}
        answers = self.admin.list_offsets(wanted, isolation_level=level, request_timeout=ADMIN_TIMEOUT_SECS)
        return {asked.partition: future.result().offset for asked, future in answers.items()}

    def _partitions(self, topic: str) -> list[int]:
        """Those of a topic, empty where there is none; waits while the broker has lost its leadership.

        On a machine under load the broker is fenced for a moment now and then, and a lag over no
        partitions would be 0.
        """
        found: list[int] = []

        def settled() -> bool:
            metadata = self.admin.list_topics(timeout=ADMIN_TIMEOUT_SECS).topics.get(topic)
            found[:] = sorted(metadata.partitions) if metadata is not None else []
            return metadata is None or all(part.leader >= 0 for part in metadata.partitions.values())

        wait_until(settled, ADMIN_TIMEOUT_SECS, f"leaders of {topic}")
        return found

    # --- producing ---------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        values: Iterable[bytes | None],
        partition: int | None = None,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
    ) -> int:
        """Produce and wait for every acknowledgement. Returns the number of records.

        Without `partition` the records go round over the topic's partitions, in order.
        """
        partitions = self._partitions(topic) if partition is None else [partition]
        return self.produce_all(
            ((topic, partitions[index % len(partitions)], value) for index, value in enumerate(values)),
            key=key,
            headers=headers,
        )

    def produce_all(
        self,
        records: Iterable[tuple[str, int, bytes | None]],
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
    ) -> int:
        """Produce `(topic, partition, value)`s and wait for every acknowledgement. Returns their number."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                # a new partition's leader may refuse a request and take the next: the order must survive it
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.max.bytes": 32 * 1024 * 1024,
                "queue.buffering.max.messages": 0,
                "log_level": 0,
            }
        )
        failures: list[str] = []

        def answered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append(f"{message.topic()}[{message.partition()}]: {error}")

        extra: dict[str, Any] = {"headers": list(headers)} if headers else {}
        count = 0
        for topic, partition, value in records:
            producer.produce(topic, value, key, partition, answered, **extra)
            count += 1
            if count % 10_000 == 0:
                producer.poll(0)
        if unsent := producer.flush(120):
            failures.append(f"{unsent} records without an answer")
        if failures:
            raise ServerError(f"{len(failures)} of {count} records were not produced: {failures[:3]}")
        return count


def make_certificates(folder: Path) -> None:
    """A test authority and a server certificate for 127.0.0.1: `ca.pem`, `server.pem` (key and chain)."""
    folder.mkdir(parents=True, exist_ok=True)
    key_options = ["-newkey", "rsa:2048", "-nodes", "-days", "2"]
    _run(
        ["openssl", "req", "-x509", *key_options, "-subj", "/CN=test authority"]
        + ["-keyout", "ca-key.pem", "-out", "ca.pem"],
        cwd=folder,
    )
    _run(
        ["openssl", "req", *key_options[:3], "-subj", "/CN=localhost"]
        + ["-keyout", "key.pem", "-out", "server.csr"],
        cwd=folder,
    )
    (folder / "san.txt").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _run(
        ["openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca-key.pem"]
        + ["-CAcreateserial", "-days", "2", "-extfile", "san.txt", "-out", "cert.pem"],
        cwd=folder,
    )
    parts = [(folder / part).read_text() for part in ("key.pem", "cert.pem", "ca.pem")]
    (folder / "server.pem").write_text("".join(parts))


def _once_there_is_a_coordinator(
    consumer: KafkaConsumer, wanted: list[KafkaPartition]
) -> list[KafkaPartition]:
    """Committed offsets: the first group of a new broker waits until its topic of offsets has been made."""
    deadline = time.monotonic() + ADMIN_TIMEOUT_SECS
    while True:
        try:
            return consumer.committed(wanted, timeout=ADMIN_TIMEOUT_SECS)
        except KafkaException as error:
            if error.args[0].code() not in NO_COORDINATOR_YET or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
