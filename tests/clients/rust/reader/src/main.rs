//! reader ADDRESS generate|attach|complete|cancel REQUEST [NAME=VALUE...]: prints what a stream
//! tells, for the tests. The request, and the events, are serialized and in hex. Names:
//! reconnect_ms, timeout_ms, token; drop_after: after so many events the stream is dropped, and the
//! end of the input waited for; detach_after: after so many events it is left.

use std::collections::HashMap;
use std::io::{stdin, Read};
use std::time::Duration;

use prost::Message;
use slotwise::v1::{AttachRequest, CancelRequest, GenerateRequest, GenerateResponse};
use slotwise::{Client, Error, Events, Options};

type Settings = HashMap<String, String>;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (address, kind, request) = (&arguments[0], &arguments[1], &arguments[2]);
    let settings = arguments[3..].iter().filter_map(|one| one.split_once('='));
    let settings: Settings = settings.map(|(name, value)| (name.into(), value.into())).collect();
    match client(address, &settings) {
        Ok(client) => {
            if let Err(error) = run(client, kind, &unhex(request), &settings).await {
                let retry_after = error.retry_after.unwrap_or_default().as_millis();
                let field = error.field.unwrap_or_default();
                println!("error {}\t{field}\t{retry_after}\t{}", error.code, error.message);
            }
        }
        Err(error) => println!("refused {}", error.message),
    }
}

fn client(address: &str, settings: &Settings) -> Result<Client, Error> {
    let mut options = Options { token: settings.get("token").cloned(), ..Default::default() };
    if let Some(time) = milliseconds(settings, "reconnect_ms") {
        options.reconnect_timeout = time;
    }
    let client = Client::with_options(address, options)?;
    Ok(milliseconds(settings, "timeout_ms").map_or(client.clone(), |time| client.timeout(time)))
}

fn milliseconds(settings: &Settings, name: &str) -> Option<Duration> {
    settings.get(name).map(|text| Duration::from_millis(text.parse().unwrap()))
}

async fn run(client: Client, kind: &str, request: &[u8], settings: &Settings) -> Result<(), Error> {
    client.health("").await?;
    match kind {
        "complete" => {
            let answer = client.complete(&GenerateRequest::decode(request).unwrap()).await?;
            println!("answer {}", hex(&answer.encode_to_vec()));
            Ok(())
        }
        "cancel" => client.cancel(CancelRequest::decode(request).unwrap().request_id).await,
        _ => read(client, kind, request, settings).await,
    }
}

async fn read(
    client: Client,
    kind: &str,
    request: &[u8],
    settings: &Settings,
) -> Result<(), Error> {
    let number = |name| settings.get(name).map(|number| number.parse::<usize>().unwrap());
    let drop_after = number("drop_after");
    let mut events = start(&client, kind, request);
    let request_id = events.request_id().to_owned();
    let mut num_events = 0;
    while Some(num_events) != drop_after {
        if Some(num_events) == number("detach_after") {
            events.detach();
            // What the client would still say of the request is said before this.
            return client.health("").await.map(drop);
        }
        let event = match events.next().await {
            Some(event) => event?,
            None => break,
        };
        num_events += 1;
        let response = GenerateResponse { request_id: request_id.clone(), event: Some(event) };
        println!("event {}", hex(&response.encode_to_vec()));
    }
    if drop_after.is_some() {
        drop(events);
        println!("dropped");
        let wait = || stdin().read_to_end(&mut Vec::new());
        tokio::task::spawn_blocking(wait).await.unwrap().unwrap();
    }
    Ok(())
}

fn start(client: &Client, kind: &str, request: &[u8]) -> Events {
    match kind {
        "attach" => client.attach_request(AttachRequest::decode(request).unwrap()),
        _ => client.generate(GenerateRequest::decode(request).unwrap()),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |place| u8::from_str_radix(&text[place..place + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}
