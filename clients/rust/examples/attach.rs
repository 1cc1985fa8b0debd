//! attach ADDRESS REQUEST_ID [NEXT]: reads a request on, from token NEXT of its answer.

use std::io::{stdout, Write};

use slotwise::{Client, Error, Event};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.len() < 2 {
        eprintln!("usage: attach ADDRESS REQUEST_ID [NEXT]");
        std::process::exit(2);
    }
    let next = arguments.get(2).map_or(0, |number| number.parse().expect("a number"));
    if let Err(error) = read_on(&Client::new(&arguments[0]), &arguments[1], next).await {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

async fn read_on(client: &Client, request_id: &str, next: u32) -> Result<(), Error> {
    let mut events = client.attach(request_id, next);
    while let Some(event) = events.next().await {
        if let Event::Delta(delta) = event? {
            print!("{}", delta.text);
            stdout().flush().expect("the output is open");
        }
    }
    println!();
    Ok(())
}
