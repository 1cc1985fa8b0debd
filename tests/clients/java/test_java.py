"""The Java client: built with Debian's grpc-java, without Maven, and read with."""

from __future__ import annotations

import shlex
import shutil
from collections import deque
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest
from certificates import Authority
from clients.builds import ROOT, build_once, files_under
from clients.lossy_server import DRAINS, LOST, RESET, Fault
from clients.npm import run as run_tool
from clients.program_checks import ProgramChecks, endless, reader_command, until_idle
from clients.scripted_server import bad_field, scripted_server
from clients.toolchains import need, need_file

from slotwise.v1 import inference_pb2 as pb

pytestmark = pytest.mark.clients

SOURCES = ROOT / "clients" / "java"
READER = Path(__file__).parent / "Reader.java"
PROTOS = (ROOT / "protos", ROOT / "clients" / "protos")
FILES = ("slotwise/v1/inference.proto", "slotwise/standard.proto")
BUILD = ROOT / "build" / "java"
JARS = Path("/usr/share/java")
# By the Debian package that has them.
LIBRARIES = {
    "libgrpc-java": "grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite"
    " grpc-stub",
    "libprotobuf-java": "protobuf",
    "libguava-java": "guava",
    "libperfmark-java": "perfmark-api",
    "libnetty-java": "netty-buffer netty-codec netty-codec-http netty-codec-http2"
    " netty-codec-socks netty-common netty-handler netty-handler-proxy netty-resolver"
    " netty-transport",
    # For TLS: this Netty knows no ALPN of Java's own.
    "libnetty-tcnative-java": "netty-tcnative",
    # Of what is generated, an annotation.
    "libgeronimo-annotation-1.3-spec-java": "geronimo-annotation-1.3-spec",
}
MAIN_CLASSES = {
    "chat": "slotwise.examples.Chat",
    "cancel": "slotwise.examples.Cancel",
    "health": "slotwise.examples.Health",
    "attach": "slotwise.examples.Attach",
    "reader": "Reader",
}


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the examples and the reader: scripts that start them."""
    javac = need("javac", "openjdk-17-jdk-headless")
    need("jar", "openjdk-17-jdk-headless")
    need("java", "openjdk-17-jre-headless")
    protoc = need("protoc", "protobuf-compiler")
    need("grpc_java_plugin", "protobuf-compiler-grpc-java-plugin")
    jars = [
        need_file(f"{JARS}/{name}.jar", package)
        for package, names in LIBRARIES.items()
        for name in names.split()
    ]
    libraries = ":".join(map(str, jars))
    sources = files_under(SOURCES / "src", READER, *PROTOS)
    tools = [run_tool(javac, "-version"), run_tool(protoc, "--version"), libraries]
    build_once(BUILD, [*sources, Path(__file__)], tools, lambda: build(libraries))
    return BUILD


def build(libraries: str) -> None:
    generated, classes = BUILD / "generated", BUILD / "classes"
    for folder in (generated, classes):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    includes = [f"-I{place}" for place in PROTOS]
    plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
    outputs = (f"--java_out={generated}", plugin, f"--grpc-java_out={generated}")
    run_tool("protoc", *includes, *outputs, *FILES)

    def compile_java(*places: Path, flags: str) -> None:
        paths = ("-d", classes, "-cp", f"{classes}:{libraries}")
        run_tool("javac", "--release", "17", flags, "-Werror", *paths, *files_under(*places))

    compile_java(generated, flags="-nowarn")
    # The others are of classes that are not on the path, and of a stream that is closed by hand.
    lint = "-Xlint:all,-path,-processing,-classfile,-try"
    compile_java(SOURCES / "src", READER, flags=lint)
    run_tool("jar", "cf", BUILD / "slotwise.jar", "-C", classes, ".")
    write_programs(f"{BUILD}/slotwise.jar:{libraries}")


def write_programs(class_path: str) -> None:
    """Scripts, and an archive of the classes they load: so they start in half the time."""
    native = sorted(Path("/usr/lib").glob("*/jni/libnetty-tcnative.so"))
    need_file(str(native[0] if native else "/usr/lib/jni"), "libnetty-tcnative-jni")
    # Netty looks for it by this name, and takes no link.
    shutil.copy(native[0], BUILD / "libnetty_tcnative.so")
    archive = BUILD / "classes.jsa"
    archive.unlink(missing_ok=True)
    flags = ("-XX:TieredStopAtLevel=1", f"-Djava.library.path={BUILD}", "-cp", class_path)
    with scripted_server() as server:
        command = reader_command(Path("Reader"), server.address, pb.GenerateRequest(text="x"))
        run_tool("java", f"-XX:ArchiveClassesAtExit={archive}", *flags, *map(str, command))
    for name, main in MAIN_CLASSES.items():
        start = shlex.join(["java", f"-XX:SharedArchiveFile={archive}", *flags, main])
        script = BUILD / name
        script.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        script.chmod(0o755)


class TestJava(ProgramChecks):
    """What every client's programs must do, and what this one has besides."""

    # Half a second for each start of Java: at fewer places than the others.

    @pytest.mark.parametrize("after", [0, 1, 4, 8])
    def test_a_broken_connection_is_not_seen(self, reader, lossy, after):
        super().test_a_broken_connection_is_not_seen(reader, lossy, after)

    @pytest.mark.parametrize("after", [0, 1, 4, 8])
    @pytest.mark.parametrize("status", [LOST, RESET, DRAINS], ids=["lost", "reset", "drains"])
    def test_a_server_that_forgot_is_asked_anew(self, reader, lossy, after, status):
        super().test_a_server_that_forgot_is_asked_anew(reader, lossy, after, status)

    def test_a_refusal_names_its_field(self, reader, lossy):
        lossy.script.faults = deque([Fault(0, bad_field("stop.3", "it is empty"))])
        error = reader.read(lossy.address).error
        assert (error.code, error.field) == ("INVALID_ARGUMENT", "stop.3")

    def test_an_interrupted_reader_frees_the_slot(self, reader, small_server, small_client):
        until_idle(small_client)
        request = endless("interrupted")
        told = reader.read(small_server.address, request, settings={"interrupt_after": 3})
        assert told.error.code == "CANCELLED"
        assert told.error.message == "the thread that reads was interrupted"
        # The server knew before the program ended.
        assert small_client.load().num_unread == 0
        until_idle(small_client)

    def test_the_longest_timeout_there_is(self, reader, lossy):
        assert reader.read(lossy.address, settings={"timeout_ms": 2**63 - 1}).error is None

    def test_tls(self, reader, tmp_path):
        authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
        credentials = grpc.ssl_server_credentials([authority.pair("server").content])
        with scripted_server(credentials=credentials) as server:
            settings = {"ca": authority.path, "token": "secret"}
            assert reader.read(server.address, settings=settings).error is None
            assert server.script.tokens == ["Bearer secret"]
            error = reader.read(server.address, settings={"ca": stranger.path}).error
        assert error.code == "UNAVAILABLE"
        assert "certification path" in error.message


def test_the_pom_has_what_is_built_here():
    """Maven cannot be run without its central repository."""
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    pom = ElementTree.parse(SOURCES / "pom.xml")
    roots = [one.text for one in pom.iterfind(".//m:protoSourceRoot", space)]
    assert roots
    names = {one.text for one in pom.iterfind(".//m:dependency/m:artifactId", space)}
    assert {"grpc-netty-shaded", "grpc-protobuf", "grpc-stub"} <= names
