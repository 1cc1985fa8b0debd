//! The events of one request as they come.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep_until, timeout, Instant};

use crate::channel::{Call, Channel};
use crate::error::{Code, Error, Failure};
use crate::reading::{Reading, Request};
use crate::v1::{CancelRequest, CancelResponse, GenerateResponse};
use crate::Event;

const GENERATE: &str = "/slotwise.v1.Inference/Generate";
const ATTACH: &str = "/slotwise.v1.Inference/Attach";
const CANCEL: &str = "/slotwise.v1.Inference/Cancel";

/// For how long the end of a stream waits until the server knows of it.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);
/// Events that are read ahead.
const NUM_AHEAD: usize = 16;

/// Accepted, PromptLogprobs if asked for, Delta, and one Finished per choice; then nothing more.
///
/// A lost connection, a server that was restarted and one that sends its clients elsewhere go by
/// unseen: every token and every piece of text comes exactly once.
///
/// Dropping it cancels the request when it still runs: a task of the runtime tells the server.
/// Before a program that ends at once, [`Events::cancel`] waits for that.
pub struct Events {
    request_id: String,
    receiver: mpsc::Receiver<Result<Event, Error>>,
    is_detached: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Events {
    pub(crate) fn start(
        channel: Arc<Channel>,
        reading: Reading,
        deadline: Option<Instant>,
    ) -> Self {
        let request_id = reading.request_id().to_owned();
        let is_detached = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel(NUM_AHEAD);
        let reader = Reader { channel, reading, deadline };
        let task = tokio::spawn(reader.run(sender, is_detached.clone()));
        Self { request_id, receiver, is_detached, task }
    }

    /// The request's name, for [`Client::cancel`](crate::Client::cancel) and
    /// [`Client::attach`](crate::Client::attach).
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// The next event; None: the stream has ended.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        self.receiver.recv().await
    }

    /// Ends the request. Returns when the server knows of it, or after a second.
    pub async fn cancel(self) {
        let Self { receiver, task, .. } = self;
        drop(receiver);
        let _ = task.await;
    }

    /// Stops reading and lets the request run, for its attach window.
    pub fn detach(self) {
        self.is_detached.store(true, Ordering::Relaxed);
    }
}

impl Stream for Events {
    type Item = Result<Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.receiver.poll_recv(context)
    }
}

/// Reads a request to its end, through losses, for `Events`.
struct Reader {
    channel: Arc<Channel>,
    reading: Reading,
    deadline: Option<Instant>,
}

impl Reader {
    async fn run(
        mut self,
        sender: mpsc::Sender<Result<Event, Error>>,
        is_detached: Arc<AtomicBool>,
    ) {
        let ended = tokio::select! {
            ended = self.read(&sender) => ended,
            () = sender.closed() => Ok(()),
        };
        // Nobody reads it any more, or it is not the same any more.
        if !self.reading.is_over() && !is_detached.load(Ordering::Relaxed) {
            self.cancel().await;
        }
        if let Err(error) = ended {
            let _ = sender.send(Err(error)).await;
        }
    }

    async fn cancel(&self) {
        let request = CancelRequest { request_id: self.reading.request_id().to_owned() };
        let cancel = self.channel.unary::<_, CancelResponse>(CANCEL, &request, None);
        // Best effort: what the server has not heard of is ended by its attach window.
        let _ = timeout(CANCEL_TIMEOUT, cancel).await;
    }

    async fn read(&mut self, sender: &mpsc::Sender<Result<Event, Error>>) -> Result<(), Error> {
        loop {
            let failure = match self.read_stream(sender).await? {
                Ok(()) if self.reading.ended() => return Ok(()),
                Err(_) if self.reading.is_over() => return Ok(()),
                Ok(()) => Failure {
                    is_loss: true,
                    ..Failure::new(Code::Internal, "the stream ended before its answer did")
                },
                Err(failure) => failure,
            };
            let until = Instant::now() + self.reading.lost(failure, self.channel.was_reached())?;
            sleep_until(self.deadline.map_or(until, |deadline| until.min(deadline))).await;
        }
    }

    /// One stream, until it ends; an error where the request itself is to end.
    async fn read_stream(
        &mut self,
        sender: &mpsc::Sender<Result<Event, Error>>,
    ) -> Result<Result<(), Failure>, Error> {
        let mut call = match self.open().await {
            Ok(call) => call,
            Err(failure) => return Ok(Err(failure)),
        };
        loop {
            let event = match call.message().await {
                Ok(Some(response)) => response.event,
                Ok(None) => return Ok(Ok(())),
                Err(failure) => return Ok(Err(failure)),
            };
            if let Some(event) = event.map_or(Ok(None), |event| self.reading.take(event))? {
                // When nobody reads any more, `run` sees it.
                let _ = sender.send(Ok(event)).await;
            }
        }
    }

    async fn open(&mut self) -> Result<Call<GenerateResponse>, Failure> {
        match self.reading.next_call() {
            Request::Generate(request) => {
                self.channel.open(GENERATE, &*request, self.deadline).await
            }
            Request::Attach(request) => self.channel.open(ATTACH, &request, self.deadline).await,
        }
    }
}
