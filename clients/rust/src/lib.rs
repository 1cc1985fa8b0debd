//! A client of Slotwise.
//!
//! ```no_run
//! use slotwise::{Client, Event};
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), slotwise::Error> {
//!     let client = Client::new("127.0.0.1:50051");
//!     let mut events = client.chat("What is the capital of France?");
//!     while let Some(event) = events.next().await {
//!         if let Event::Delta(delta) = event? {
//!             print!("{}", delta.text);
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! Requests and events are the messages of `slotwise/v1/inference.proto`, in [`v1`].

mod channel;
mod client;
mod error;
mod events;
mod reading;
mod received;
mod standard {
    include!("generated/slotwise.standard.rs");
}
/// The messages of the API; the proto says what every field means, also when it is unset.
#[allow(clippy::large_enum_variant)]
pub mod v1 {
    include!("generated/slotwise.v1.rs");
}

pub use channel::{Connecting, Io};
pub use client::{Client, Options};
pub use error::{Code, Error};
pub use events::Events;
pub use standard::health_check_response::ServingStatus;
pub use v1::generate_response::Event;
