//! A client of one server.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderValue;
use prost::Message;
use tokio::time::Instant;

use crate::channel::{tcp, Channel, Connector, Io};
use crate::error::{Code, Error};
use crate::events::Events;
use crate::reading::{Reading, Request};
use crate::standard::{HealthCheckRequest, HealthCheckResponse};
use crate::v1::generate_request::Input;
use crate::v1::{
    AttachRequest, CancelRequest, CancelResponse, Chat, ChatMessage, CompleteResponse,
    GenerateRequest,
};
use crate::ServingStatus;

/// How a client reaches its server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sent with every call. Without TLS it goes only to this machine, or anywhere with
    /// `insecure_token`.
    pub token: Option<String>,
    pub insecure_token: bool,
    /// A stream that is lost goes on, unless there was no news for so long. Zero: it is not tried.
    pub reconnect_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let reconnect_timeout = Duration::from_secs(60);
        Self { token: None, insecure_token: false, reconnect_timeout }
    }
}

/// A client of one server, for any number of tasks; its clones share a connection. Its methods are
/// to be called in a runtime of tokio. The future of a call, and a stream, end it when dropped.
#[derive(Clone)]
pub struct Client {
    channel: Arc<Channel>,
    reconnect_timeout: Duration,
    timeout: Option<Duration>,
}

impl Client {
    /// `address`: "HOST:PORT". It is dialled at the first call.
    pub fn new(address: &str) -> Self {
        Self::over(address, tcp(address.to_owned()), None, Options::default().reconnect_timeout)
    }

    /// InvalidArgument for a token that cannot be sent, or that everybody on the way could read.
    pub fn with_options(address: &str, options: Options) -> Result<Self, Error> {
        if options.token.is_some() && !options.insecure_token && !is_local(address) {
            let message = format!(
                "the token would go to {address} unencrypted; use TLS, or allow it \
                 (insecure_token) where the network is trusted"
            );
            return Err(Error::new(Code::InvalidArgument, message));
        }
        let authorization = authorization(options.token.as_deref())?;
        Ok(Self::over(address, tcp(address.to_owned()), authorization, options.reconnect_timeout))
    }

    /// `connect` dials: TLS with the protocol "h2", say by tokio-rustls, or a Unix socket. The
    /// `address` is then only the name that is sent.
    pub fn with_connector<F, C, T>(
        address: &str,
        options: Options,
        connect: C,
    ) -> Result<Self, Error>
    where
        C: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = io::Result<T>> + Send + 'static,
        T: Io + 'static,
    {
        let connector: Connector = Box::new(move || {
            let connecting = connect();
            Box::pin(async { Ok(Box::new(connecting.await?) as Box<dyn Io>) })
        });
        let authorization = authorization(options.token.as_deref())?;
        Ok(Self::over(address, connector, authorization, options.reconnect_timeout))
    }

    fn over(
        address: &str,
        connector: Connector,
        authorization: Option<HeaderValue>,
        reconnect_timeout: Duration,
    ) -> Self {
        let channel = Arc::new(Channel::new(address.to_owned(), connector, authorization));
        Self { channel, reconnect_timeout, timeout: None }
    }

    /// The same, with a deadline for each call, which the server keeps too.
    pub fn timeout(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self.clone() }
    }

    /// Where the request has no id, seed or attach window it gets them, so that it can go on.
    pub fn generate(&self, request: GenerateRequest) -> Events {
        self.read(Request::Generate(Box::new(request)))
    }

    /// One question in the chat format of the model; [`GenerateRequest::chat`] takes more options.
    pub fn chat(&self, question: impl Into<String>) -> Events {
        self.generate(GenerateRequest::chat(question))
    }

    /// Reads a request on from this token of its answer: one that runs, or ended not long ago.
    pub fn attach(&self, request_id: impl Into<String>, next_token_index: u32) -> Events {
        let request_id = request_id.into();
        self.attach_request(AttachRequest { request_id, next_token_index, ..Default::default() })
    }

    /// The same for a request with several answers, or with prompt logprobs.
    pub fn attach_request(&self, request: AttachRequest) -> Events {
        self.read(Request::Attach(request))
    }

    /// The whole answer at once; it does not go on after a loss.
    pub async fn complete(&self, request: &GenerateRequest) -> Result<CompleteResponse, Error> {
        self.call("Complete", request).await
    }

    /// Ends a request of any connection. NotFound: it does not wait or run.
    pub async fn cancel(&self, request_id: impl Into<String>) -> Result<(), Error> {
        let request = CancelRequest { request_id: request_id.into() };
        self.call::<_, CancelResponse>("Cancel", &request).await.map(drop)
    }

    /// "slotwise.v1.Inference": requests are taken; "": the process lives.
    pub async fn health(&self, service: &str) -> Result<ServingStatus, Error> {
        let request = HealthCheckRequest { service: service.to_owned() };
        let answer: HealthCheckResponse =
            self.unary("/grpc.health.v1.Health/Check", &request).await?;
        Ok(answer.status())
    }

    /// Any call of the API that has one answer, by its name in the proto: "GetLoad", say.
    pub async fn call<Q, R>(&self, name: &str, request: &Q) -> Result<R, Error>
    where
        Q: Message,
        R: Message + Default,
    {
        self.unary(&format!("/slotwise.v1.Inference/{name}"), request).await
    }

    fn read(&self, request: Request) -> Events {
        let reading = Reading::new(request, self.reconnect_timeout);
        Events::start(self.channel.clone(), reading, self.deadline())
    }

    async fn unary<Q, R>(&self, path: &str, request: &Q) -> Result<R, Error>
    where
        Q: Message,
        R: Message + Default,
    {
        self.channel.unary(path, request, self.deadline()).await.map_err(|failure| failure.error)
    }

    fn deadline(&self) -> Option<Instant> {
        self.timeout.map(|timeout| Instant::now() + timeout)
    }
}

impl GenerateRequest {
    /// A request with one question in the chat format of the model.
    pub fn chat(question: impl Into<String>) -> Self {
        let message = ChatMessage {
            role: "user".to_owned(),
            content: Some(question.into()),
            ..Default::default()
        };
        let chat = Chat { messages: vec![message], ..Default::default() };
        Self { input: Some(Input::Chat(chat)), ..Default::default() }
    }
}

fn authorization(token: Option<&str>) -> Result<Option<HeaderValue>, Error> {
    token.map(bearer).transpose()
}

fn bearer(token: &str) -> Result<HeaderValue, Error> {
    // The token itself is never shown.
    let bad = || {
        let message = "the token is empty, or has characters besides printable ASCII";
        Error::new(Code::InvalidArgument, message)
    };
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(bad());
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| bad())?;
    value.set_sensitive(true);
    Ok(value)
}

/// The address stays on this machine. What is not understood does not.
fn is_local(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().map_or(false, |ip| ip.is_loopback())
}
