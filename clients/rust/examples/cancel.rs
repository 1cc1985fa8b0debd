//! cancel ADDRESS QUESTION NUM_EVENTS: reads so many events of an answer, then stops it.

use slotwise::{Client, Error, Event};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().expect("ADDRESS");
    let question = arguments.next().expect("QUESTION");
    let num_events = arguments.next().expect("NUM_EVENTS").parse().expect("a number");
    if let Err(error) = stop_after(num_events, &Client::new(&address), &question).await {
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
