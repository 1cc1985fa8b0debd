//! health ADDRESS [SERVICE]: exits 0 when it is SERVING, 1 when not. By default it is asked whether
//! requests are taken; of SERVICE "" whether the process lives.

use std::process::exit;
use std::time::Duration;

use slotwise::{Client, ServingStatus};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.len() < 1 {
        eprintln!("usage: health ADDRESS [SERVICE]");
        exit(2);
    }
    let service = arguments.get(1).map_or("slotwise.v1.Inference", String::as_str);
    match Client::new(&arguments[0]).timeout(Duration::from_secs(5)).health(service).await {
        Ok(ServingStatus::Serving) => println!("SERVING"),
        Ok(status) => {
            eprintln!("{}", status.as_str_name());
            exit(1);
        }
        Err(error) => {
            eprintln!("error: {error}");
            exit(1);
        }
    }
}
