//! chat ADDRESS QUESTION [MAX_NEW_TOKENS]: streams an answer.

use std::io::{stdout, Write};

use slotwise::v1::{GenerateRequest, SamplingParams};
use slotwise::{Client, Error, Event};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.len() < 2 {
        eprintln!("usage: chat ADDRESS QUESTION [MAX_NEW_TOKENS]");
        std::process::exit(2);
    }
    let max_new_tokens = arguments.get(2).map_or(64, |number| number.parse().expect("a number"));
    if let Err(error) = chat(&Client::new(&arguments[0]), &arguments[1], max_new_tokens).await {
        eprintln!("error: {error}");
        if let Some(field) = error.field {
            eprintln!("field: {field}");
        }
        std::process::exit(1);
    }
}

async fn chat(client: &Client, question: &str, max_new_tokens: u32) -> Result<(), Error> {
    let mut events = client.generate(GenerateRequest {
        max_new_tokens: Some(max_new_tokens),
        sampling: Some(SamplingParams { temperature: Some(0.0), ..Default::default() }),
        ..GenerateRequest::chat(question)
    });
    while let Some(event) = events.next().await {
        if let Event::Delta(delta) = event? {
            print!("{}", delta.text);
            stdout().flush().expect("the output is open");
        }
    }
    println!();
    Ok(())
}
