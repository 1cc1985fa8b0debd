//! health ADDRESS [SERVICE]: exits 0 when it is SERVING, 1 when not. By default it is asked whether
//! requests are taken; of SERVICE "" whether the process lives.

use std::process::exit;
use std::time::Duration;

use slotwise::{Client, ServingStatus};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().expect("ADDRESS");
    let service = arguments.next().unwrap_or_else(|| "slotwise.v1.Inference".to_owned());
    match Client::new(&address).timeout(Duration::from_secs(5)).health(&service).await {
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
