//! Writes the messages of the protos as Rust: `slotwise-codegen PROTO_FOLDER... OUT_FOLDER`. Needs
//! protoc.

use std::path::{Path, PathBuf};

const PROTOS: [&str; 2] = ["slotwise/v1/inference.proto", "slotwise/standard.proto"];

fn main() -> std::io::Result<()> {
    let mut folders: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let out = folders.pop().expect("usage: slotwise-codegen PROTO_FOLDER... OUT_FOLDER");
    // Comments of the protos would be read as Markdown with code to test.
    prost_build::Config::new()
        .out_dir(out)
        .disable_comments(["."])
        .compile_protos(&PROTOS.map(Path::new), &folders)
}
