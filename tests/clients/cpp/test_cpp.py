"""The C++ client: built with CMake, and read with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from clients.builds import ROOT, build_once, files_under
from clients.npm import run
from clients.program_checks import ProgramChecks
from clients.toolchains import need, need_file

pytestmark = pytest.mark.clients

SOURCES = ROOT / "clients" / "cpp"
PROJECT = ROOT / "tests" / "clients" / "cpp"
BUILD = ROOT / "build" / "cpp"
PROTOS = (ROOT / "protos" / "slotwise" / "v1", ROOT / "clients" / "protos")


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the examples and the reader."""
    cmake = need("cmake", "cmake")
    need("ninja", "ninja-build")
    need("c++", "g++")
    need("protoc", "protobuf-compiler")
    need("grpc_cpp_plugin", "protobuf-compiler-grpc")
    need("pkg-config", "pkg-config")
    need_file("/usr/include/google/protobuf/message.h", "libprotobuf-dev")
    need_file("/usr/include/grpcpp/grpcpp.h", "libgrpc++-dev")
    tools = (run("c++", "--version"), run("pkg-config", "--modversion", "grpc++", "protobuf"))

    def build() -> None:
        # Debug: half the time of a build for speed.
        flags = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-g0 -Werror")
        run(cmake, "-S", PROJECT, "-B", BUILD, *flags)
        run(cmake, "--build", BUILD)

    build_once(BUILD, files_under(SOURCES, PROJECT, *PROTOS), tools, build)
    return BUILD / "bin"


class TestCpp(ProgramChecks):
    """What every client's programs must do, and what this one has besides."""

    def test_the_longest_timeout_there_is(self, reader, lossy):
        assert reader.read(lossy.address, settings={"timeout_ms": 2**63 - 1}).error is None


def test_what_is_missing_is_named(tmp_path):
    """By CMake, with the package of Debian."""
    cmake = need("cmake", "cmake")
    command = [cmake, "-S", SOURCES, "-B", tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_Protobuf=ON"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode != 0
    assert "apt-get install protobuf-compiler libprotobuf-dev" in " ".join(done.stderr.split())
