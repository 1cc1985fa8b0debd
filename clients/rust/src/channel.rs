//! gRPC over one HTTP/2 connection, which is dialled when a call needs it.

use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::client::{Connection, SendRequest};
use h2::{Ping, PingPong, RecvStream};
use http::header::{HeaderValue, AUTHORIZATION, CONTENT_TYPE, TE, USER_AGENT};
use http::{Request, StatusCode, Uri};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout, timeout_at, Instant};

use crate::error::{status_of, Code, Failure};

const MAX_MESSAGE_BYTES: usize = 64 << 20;
const WINDOW_BYTES: u32 = 4 << 20;
/// Of a message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Pings find a dead peer behind a silent connection.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to write and read bytes: of TCP, of TLS over it, and so on.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// What dials: a new connection, or why there is none.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Io>>> + Send>>;
pub(crate) type Connector = Box<dyn Fn() -> Connecting + Send + Sync>;

pub(crate) fn tcp(address: String) -> Connector {
    Box::new(move || {
        let address = address.clone();
        Box::pin(async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Io>)
        })
    })
}

pub(crate) struct Channel {
    /// As HTTP has it: "HOST:PORT".
    authority: String,
    connector: Connector,
    authorization: Option<HeaderValue>,
    sender: Mutex<Option<SendRequest<Bytes>>>,
    was_reached: AtomicBool,
}

impl Channel {
    pub fn new(
        authority: String,
        connector: Connector,
        authorization: Option<HeaderValue>,
    ) -> Self {
        let (sender, was_reached) = Default::default();
        Self { authority, connector, authorization, sender, was_reached }
    }

    /// The server has answered once: what is lost now may come back.
    pub fn was_reached(&self) -> bool {
        self.was_reached.load(Ordering::Relaxed)
    }

    /// A call with one answer.
    pub async fn unary<Q, R>(
        &self,
        path: &str,
        request: &Q,
        deadline: Option<Instant>,
    ) -> Result<R, Failure>
    where
        Q: Message,
        R: Message + Default,
    {
        let mut call = self.open(path, request, deadline).await?;
        let answer = call.message().await?;
        // The status comes behind it.
        let rest = call.message().await?;
        match (answer, rest) {
            (Some(answer), None) => Ok(answer),
            _ => {
                Err(Failure::new(Code::Internal, format!("{path} was not answered by one message")))
            }
        }
    }

    /// A call with a stream of answers; it is cancelled when it is dropped.
    pub async fn open<Q, R>(
        &self,
        path: &str,
        request: &Q,
        deadline: Option<Instant>,
    ) -> Result<Call<R>, Failure>
    where
        Q: Message,
        R: Message + Default,
    {
        within(deadline, self.begin(path, request, deadline)).await
    }

    async fn begin<Q, R>(
        &self,
        path: &str,
        request: &Q,
        deadline: Option<Instant>,
    ) -> Result<Call<R>, Failure>
    where
        Q: Message,
        R: Message + Default,
    {
        let head = self.head(path, deadline)?;
        let mut sender = self.sender().await?;
        let (response, mut body) = sender.send_request(head, false).map_err(|e| self.broken(e))?;
        body.send_data(frame(request), true).map_err(|e| self.broken(e))?;
        let response = response.await.map_err(|e| self.broken(e))?;
        self.was_reached.store(true, Ordering::Relaxed);
        match response.status() {
            StatusCode::OK => {}
            // Of a proxy.
            code if code.is_server_error() => return Err(self.broken(code)),
            code => return Err(Failure::new(Code::Unknown, format!("HTTP status {code}"))),
        }
        // An answer without messages may have its trailers as its headers.
        if let Some(Err(failure)) = status_of(response.headers()) {
            return Err(failure);
        }
        let authority = self.authority.clone();
        let (buffer, kind) = (BytesMut::new(), PhantomData);
        Ok(Call { authority, deadline, body: response.into_body(), buffer, kind })
    }

    fn head(&self, path: &str, deadline: Option<Instant>) -> Result<Request<()>, Failure> {
        let uri =
            Uri::builder().scheme("http").authority(self.authority.as_str()).path_and_query(path);
        let mut head = Request::post(uri.build().map_err(|e| {
            let message = format!("{:?} is no address like HOST:PORT: {e}", self.authority);
            Failure::new(Code::InvalidArgument, message)
        })?)
        .header(TE, "trailers")
        .header(CONTENT_TYPE, "application/grpc")
        .header(USER_AGENT, concat!("slotwise-rust/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.authorization {
            head = head.header(AUTHORIZATION, token);
        }
        if let Some(deadline) = deadline {
            head = head.header("grpc-timeout", timeout_text(deadline));
        }
        Ok(head.body(()).expect("these headers are good"))
    }

    /// Of a connection that is ready for one more call.
    async fn sender(&self) -> Result<SendRequest<Bytes>, Failure> {
        let mut sender = self.sender.lock().await;
        if let Some(open) = sender.take() {
            if let Ok(ready) = open.ready().await {
                return Ok(sender.insert(ready).clone());
            }
        }
        let dialled = timeout(DIAL_TIMEOUT, self.dial()).await;
        let dialled = dialled.map_err(|_| self.broken("it took too long to connect"))??;
        Ok(sender.insert(dialled).clone())
    }

    async fn dial(&self) -> Result<SendRequest<Bytes>, Failure> {
        let io = (self.connector)().await.map_err(|e| self.broken(e))?;
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .handshake(io)
            .await
            .map_err(|e| self.broken(e))?;
        tokio::spawn(drive(connection));
        sender.ready().await.map_err(|e| self.broken(e))
    }

    fn broken(&self, why: impl std::fmt::Display) -> Failure {
        Failure::loss(format!("no answer from {}: {why}", self.authority))
    }
}

/// The answers of one call.
pub(crate) struct Call<R> {
    authority: String,
    deadline: Option<Instant>,
    body: RecvStream,
    buffer: BytesMut,
    kind: PhantomData<fn() -> R>,
}

impl<R: Message + Default> Call<R> {
    /// The next one; None: the call has ended well.
    pub async fn message(&mut self) -> Result<Option<R>, Failure> {
        within(self.deadline, self.read()).await
    }

    async fn read(&mut self) -> Result<Option<R>, Failure> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            match self.body.data().await {
                Some(Ok(data)) => {
                    let _ = self.body.flow_control().release_capacity(data.len());
                    self.buffer.extend_from_slice(&data);
                }
                Some(Err(error)) => return Err(self.broken(error)),
                None => return self.end().await,
            }
        }
    }

    fn take(&mut self) -> Result<Option<R>, Failure> {
        if self.buffer.len() < PREFIX_BYTES {
            return Ok(None);
        }
        let mut prefix = &self.buffer[..PREFIX_BYTES];
        if prefix.get_u8() != 0 {
            return Err(Failure::new(
                Code::Internal,
                "a compressed answer, which was not asked for",
            ));
        }
        let length = prefix.get_u32() as usize;
        if length > MAX_MESSAGE_BYTES {
            let message = format!("an answer of {length} bytes is larger than {MAX_MESSAGE_BYTES}");
            return Err(Failure::new(Code::ResourceExhausted, message));
        }
        if self.buffer.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        let message = R::decode(self.buffer.split_to(length));
        message.map(Some).map_err(|e| Failure::new(Code::Internal, format!("a bad answer: {e}")))
    }

    async fn end(&mut self) -> Result<Option<R>, Failure> {
        let trailers = self.body.trailers().await.map_err(|e| self.broken(e))?;
        match trailers.as_ref().and_then(status_of) {
            Some(Ok(())) if self.buffer.is_empty() => Ok(None),
            Some(Err(failure)) => Err(failure),
            _ => Err(self.broken("the answer broke off")),
        }
    }

    fn broken(&self, why: impl std::fmt::Display) -> Failure {
        Failure::loss(format!("no answer from {}: {why}", self.authority))
    }
}

async fn drive(mut connection: Connection<Box<dyn Io>, Bytes>) {
    let pings = connection.ping_pong().expect("asked for once");
    // Its end is told to the calls on it.
    tokio::select! {
        _ = connection => {}
        () = until_dead(pings) => {}
    }
}

async fn until_dead(mut pings: PingPong) {
    loop {
        sleep(PING_INTERVAL).await;
        if !matches!(timeout(PING_TIMEOUT, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}

fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(PREFIX_BYTES + length);
    frame.put_u8(0);
    frame.put_u32(length as u32);
    message.encode(&mut frame).expect("there is room");
    frame.freeze()
}

/// At most eight digits, and a unit.
fn timeout_text(deadline: Instant) -> String {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.as_millis() {
        ms @ 0..=99_999_999 => format!("{ms}m"),
        _ => format!("{}S", left.as_secs().min(99_999_999)),
    }
}

async fn within<T>(
    deadline: Option<Instant>,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match deadline {
        None => work.await,
        Some(deadline) => timeout_at(deadline, work)
            .await
            .unwrap_or_else(|_| Err(Failure::new(Code::DeadlineExceeded, "the timeout passed"))),
    }
}
