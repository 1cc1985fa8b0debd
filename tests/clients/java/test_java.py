"""The Java client: built with Debian's grpc-java, without Maven, and read with."""

from __future__ import annotations

import shlex
from collections import deque
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest
from certificates import Authority
from clients.builds import ROOT, build_once, files_under
from clients.lossy_server import Fault
from clients.npm import run as run_tool
from clients.program_checks import ProgramChecks, endless, reader_command, run, until_idle
from clients.scripted_server import bad_field, scripted_server
from clients.toolchains import need, need_file

from slotwise.v1 import inference_pb2 as pb

pytestmark = pytest.mark.clients

SOURCES = ROOT / "clients" / "java"
READER = Path(__file__).parent / "Reader.java"
PROTOS = (ROOT / "protos", ROOT / "clients" / "protos")
FILES = ("slotwise/v1/inference.proto", "slotwise/standard.proto")
BUILD = ROOT / "build" / "java"
CLASSES = BUILD / "classes"
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
    java = need("java", "openjdk-17-jre-headless")
    protoc = need("protoc", "protobuf-compiler")
    plugin = need("grpc_java_plugin", "protobuf-compiler-grpc-java-plugin")
    jars = [
        need_file(f"{JARS}/{name}.jar", package)
        for package, names in LIBRARIES.items()
        for name in names.split()
    ]
    class_path = ":".join(map(str, [CLASSES, *jars]))
    sources = files_under(SOURCES / "src", READER, *PROTOS)
    generated = BUILD / "generated"

    def generate_and_compile() -> None:
        generated.mkdir(exist_ok=True)
        includes = [f"-I{place}" for place in PROTOS]
        grpc_java = (f"--plugin=protoc-gen-grpc-java={plugin}", f"--grpc-java_out={generated}")
        run_tool(protoc, *includes, f"--java_out={generated}", *grpc_java, *FILES)
        compile_java(files_under(generated), "-nowarn")
        # The others are of classes that are not on the path, and of a stream closed by hand.
        compile_java(ours(), "-Xlint:all,-path,-processing,-classfile,-try", "-Werror")
        for name, main in MAIN_CLASSES.items():
            # A program that lives a second is not worth compiling well.
            flags = f"-XX:TieredStopAtLevel=1 -Xshare:auto -cp {shlex.quote(class_path)}"
            script = BUILD / name
            script.write_text(f'#!/bin/sh\nexec {java} {flags} {main} "$@"\n')
            script.chmod(0o755)

    def compile_java(files: list[Path], *flags: str) -> None:
        CLASSES.mkdir(exist_ok=True)
        java_files = [one for one in files if one.suffix == ".java"]
        run_tool(javac, *flags, "--release", "17", "-d", CLASSES, "-cp", class_path, *java_files)

    def ours() -> list[Path]:
        return files_under(SOURCES / "src", READER)

    tools = [run_tool(javac, "-version"), run_tool(protoc, "--version"), class_path]
    build_once(BUILD, sources, tools, generate_and_compile)
    return BUILD


class TestJava(ProgramChecks):
    """What every client's programs must do, and what this one has besides."""

    def test_cancel_stops_a_request_by_its_id(self, programs, small_server, small_client):
        stream = small_server.stub.Generate(endless("another's"))
        next(stream)
        command = [programs / "reader", small_server.address, "cancel"]
        command.append(pb.CancelRequest(request_id="another's").SerializeToString().hex())
        assert run(*command).stdout == ""
        *_, last = stream
        assert last.finished.finish_reason == pb.FINISH_REASON_CANCELLED
        until_idle(small_client)
        assert run(*command).stdout.startswith("error NOT_FOUND")

    def test_what_is_detached_goes_on(self, programs, lossy):
        lossy.script.blocked = True
        request = pb.GenerateRequest(text="x", request_id="left")
        done = run(*reader_command(programs / "reader", lossy.address, request, detach_after=2))
        assert done.stdout.endswith("dropped\n")
        assert lossy.script.cancelled == []

    def test_a_refusal_names_its_field(self, reader, lossy):
        lossy.script.faults = deque([Fault(0, bad_field("stop.3", "it is empty"))])
        error = reader.read(lossy.address).error
        assert (error.code, error.field) == ("INVALID_ARGUMENT", "stop.3")

    def test_tls(self, reader, tmp_path):
        authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
        credentials = grpc.ssl_server_credentials([authority.pair("server").content])
        with scripted_server(credentials=credentials) as server:
            settings = {"ca": authority.path, "token": "secret"}
            assert reader.read(server.address, settings=settings).error is None
            assert server.script.tokens == ["Bearer secret"]
            error = reader.read(server.address, settings={"ca": stranger.path}).error
        assert error.code == "UNAVAILABLE"


def test_the_pom_has_what_is_built_here():
    """Maven cannot be run without its central repository."""
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    pom = ElementTree.parse(SOURCES / "pom.xml")
    roots = [one.text for one in pom.iterfind(".//m:protoSourceRoot", space)]
    assert roots
    names = {one.text for one in pom.iterfind(".//m:dependency/m:artifactId", space)}
    assert {"grpc-netty-shaded", "grpc-protobuf", "grpc-stub"} <= names
