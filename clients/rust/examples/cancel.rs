//! cancel ADDRESS QUESTION NUM_EVENTS: reads so many events of an answer, then stops it.

use slotwise::{Client, Error, Event};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.len() < 3 {
        eprintln!("usage: cancel ADDRESS QUESTION NUM_EVENTS");
        std::process::exit(2);
    }
    let num_events = arguments[2].parse().expect("a number");
    if let Err(error) = stop_after(num_events, &Client::new(&arguments[0]), &arguments[1]).await {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

async fn stop_after(num_events: u32, client: &Client, question: &str) -> Result<(), Error> {
    let mut events = client.chat(question);
    for _ in 0..num_events {
        if let Some(Event::Delta(delta)) = events.next().await.transpose()? {
            print!("{}", delta.text);
        }
    }
    println!("\ncancelled {}", events.request_id());
    // Dropping the events does it too, in the background; client.cancel(request_id) ends any other
    // request.
    events.cancel().await;
    Ok(())
}
