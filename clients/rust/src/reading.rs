//! One request as its reader sees it: what came, and how to go on when the stream is lost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::{Code, Error, Failure};
use crate::received::{Received, Refusal};
use crate::v1::{
    Accepted, AttachRequest, Delta, FinishReason, Finished, GenerateRequest, PromptLogprobs,
};
use crate::Event;

const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(2);
/// Within what a server allows by default.
const ATTACH_WINDOW_MS: u32 = 30_000;

/// What to send for a stream.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Generate(Box<GenerateRequest>),
    Attach(AttachRequest),
}

/// How to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Send,
    Attach,
    /// From the first token on, which are compared with those that came.
    AttachToAll,
    /// As the first time, but without an attach window: the server takes none.
    SendPlain,
}

/// It has an id and a seed from the start: sent anew, it is the same request. What a new run repeats
/// is compared with what came, and not told again.
pub(crate) struct Reading {
    id: String,
    /// None: it was sent by another.
    request: Option<GenerateRequest>,
    way: Way,
    is_over: bool,
    has_own_window: bool,
    is_accepted: bool,
    /// The present stream has begun.
    is_heard: bool,
    is_unread: bool,
    num_sent: u32,
    num_choices: u32,
    next_prompt: u32,
    received: BTreeMap<u32, Received>,
    reconnect_timeout: Duration,
    delay: Duration,
    /// Since when there is no stream, and for how long there was none since the last news.
    lost_at: Option<Instant>,
    lost_for: Duration,
    began_at: Instant,
    last_failure: String,
    /// When the server can last have known that somebody reads (None: long ago), and for how long
    /// it could not.
    heard_at: Option<Instant>,
    silence: Duration,
}

impl Reading {
    pub fn new(request: Request, reconnect_timeout: Duration) -> Self {
        let now = Instant::now();
        let mut reading = Self {
            id: String::new(),
            request: None,
            way: Way::Attach,
            is_over: false,
            has_own_window: false,
            is_accepted: false,
            is_heard: false,
            is_unread: false,
            num_sent: 0,
            num_choices: 0,
            next_prompt: 0,
            received: BTreeMap::new(),
            reconnect_timeout,
            delay: FIRST_DELAY,
            lost_at: None,
            lost_for: Duration::ZERO,
            began_at: now,
            last_failure: String::new(),
            heard_at: Some(now),
            silence: Duration::ZERO,
        };
        match request {
            Request::Generate(request) => reading.will_send(*request),
            Request::Attach(request) => reading.will_attach(request),
        }
        reading
    }

    fn will_send(&mut self, request: GenerateRequest) {
        self.way = Way::Send;
        self.has_own_window = request.attach_window_ms.is_none();
        self.num_choices = request.n.unwrap_or(1).max(1);
        let request = named(request, !self.reconnect_timeout.is_zero());
        self.id = request.request_id.clone().unwrap_or_default();
        self.request = Some(request);
    }

    fn will_attach(&mut self, request: AttachRequest) {
        self.id = request.request_id;
        self.next_prompt = request.next_prompt_token_index;
        let firsts =
            std::iter::once(request.next_token_index).chain(request.other_next_token_indices);
        self.received = (0..).zip(firsts.map(Received::from)).collect();
    }

    pub fn request_id(&self) -> &str {
        &self.id
    }

    /// It has ended, by its last message or by a status: nothing is left to cancel.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    pub fn next_call(&mut self) -> Request {
        self.is_heard = false;
        let attaches = self.way == Way::Attach;
        for received in self.received.values_mut() {
            received.rewind(!attaches);
        }
        if let (Way::Send, Some(request)) = (self.way, &self.request) {
            self.num_sent += 1;
            return Request::Generate(Box::new(request.clone()));
        }
        self.silence = self.heard_at.map_or(Duration::MAX, |heard_at| heard_at.elapsed());
        let mut request = AttachRequest { request_id: self.id.clone(), ..Default::default() };
        if attaches {
            let last = self.received.keys().last().copied().unwrap_or(0);
            let mut indices =
                (0..=last).map(|index| self.received.get(&index).map_or(0, Received::num_tokens));
            request.next_token_index = indices.next().unwrap_or(0);
            request.other_next_token_indices = indices.collect();
            request.next_prompt_token_index = self.next_prompt;
        }
        Request::Attach(request)
    }

    /// An event, cut to what is new for the reader; None: nothing is.
    pub fn take(&mut self, mut event: Event) -> Result<Option<Event>, Error> {
        self.heard_at = Some(Instant::now());
        let is_new = match &mut event {
            Event::Accepted(accepted) => return Ok(self.take_accepted(accepted)?.then_some(event)),
            Event::Delta(delta) => self.take_delta(delta)?,
            Event::Finished(finished) => self.take_finished(finished),
            Event::PromptLogprobs(part) => self.take_prompt_logprobs(part),
        };
        if is_new {
            self.lost_for = Duration::ZERO;
            self.delay = FIRST_DELAY;
            self.last_failure.clear();
        }
        Ok(is_new.then_some(event))
    }

    /// The stream ended with a failure. How long to wait before `next_call`; an error where there is
    /// no way on. `was_reached`: the server has answered once, so that what is lost may come back.
    pub fn lost(&mut self, failure: Failure, was_reached: bool) -> Result<Duration, Error> {
        self.count_loss();
        let way = self.way_on(&failure, was_reached);
        if let (Some(Way::SendPlain), Some(request)) = (way, &mut self.request) {
            request.attach_window_ms = None;
            self.num_sent -= 1;
            self.way = Way::Send;
            return Ok(Duration::ZERO);
        }
        let delay = self.delay.max(failure.error.retry_after.unwrap_or_default());
        match way {
            Some(way) if self.lost_for + delay <= self.reconnect_timeout => {
                self.way = way;
                self.last_failure = failure.error.message;
                self.delay = (2 * self.delay).min(MAX_DELAY);
                Ok(delay)
            }
            _ => {
                self.is_over = true;
                Err(self.told(failure.error))
            }
        }
    }

    /// A deadline says what it was that took so long.
    fn told(&self, mut error: Error) -> Error {
        if error.code == Code::DeadlineExceeded && !self.last_failure.is_empty() {
            error.message = format!("the timeout passed; before that: {}", self.last_failure);
        }
        error
    }

    /// The stream ended without a failure; whether nothing is missing.
    pub fn ended(&mut self) -> bool {
        // How many answers an attached request has may not be known here.
        self.is_over = self.is_over || self.request.is_none();
        self.is_over
    }

    /// Time with a server counts back, also where it had no news yet.
    fn count_loss(&mut self) {
        let now = Instant::now();
        self.lost_for = match self.lost_at {
            Some(lost_at) => self.lost_for + (now - lost_at),
            None => self.lost_for.saturating_sub(now - self.began_at),
        };
        self.lost_at = Some(now);
    }

    fn way_on(&mut self, failure: &Failure, was_reached: bool) -> Option<Way> {
        if std::mem::take(&mut self.is_unread) {
            return Some(Way::Send);
        }
        if failure.is_loss {
            let is_sent_anew = self.request.is_some() && !self.is_accepted;
            return was_reached.then_some(if is_sent_anew { Way::Send } else { Way::Attach });
        }
        if failure.reason == "SLOW_READER" {
            // Nobody read since long before its last messages were taken here.
            self.heard_at = None;
            return Some(Way::Attach);
        }
        match &self.request {
            Some(request) => self.way_on_of_request(request, failure),
            None => (failure.error.code == Code::Unavailable).then_some(Way::Attach),
        }
    }

    fn way_on_of_request(&self, request: &GenerateRequest, failure: &Failure) -> Option<Way> {
        let attached = self.way != Way::Send;
        match failure.error.code {
            // After Accepted it is the request's own end: given up there, but not elsewhere. Else
            // the server starts or drains.
            Code::Unavailable if attached && self.is_heard || !self.is_accepted => Some(Way::Send),
            Code::Unavailable => Some(Way::Attach),
            Code::NotFound | Code::Unimplemented => attached.then_some(Way::Send),
            Code::FailedPrecondition if failure.reason == "EXPIRED_REQUEST" => {
                attached.then_some(Way::Send)
            }
            Code::OutOfRange => (self.way == Way::Attach).then_some(Way::AttachToAll),
            Code::AlreadyExists => (self.num_sent > 1 && !attached).then_some(Way::Attach),
            Code::ResourceExhausted => self.is_accepted.then_some(self.way),
            Code::InvalidArgument => {
                let is_window = failure.error.field.as_deref() == Some("attach_window_ms");
                let is_own = self.has_own_window && request.attach_window_ms.is_some();
                (is_window && is_own).then_some(Way::SendPlain)
            }
            _ => None,
        }
    }

    fn take_accepted(&mut self, accepted: &Accepted) -> Result<bool, Error> {
        self.is_heard = true;
        self.began_at = Instant::now();
        if let Some(lost_at) = self.lost_at.take() {
            self.lost_for += self.began_at - lost_at;
        }
        match &self.request {
            None => self.num_choices = accepted.num_choices,
            Some(request) => {
                let seed = request.sampling.as_ref().and_then(|sampling| sampling.seed);
                let is_repeated = self.is_accepted || self.num_sent > 1;
                if is_repeated && seed != Some(accepted.seed) {
                    self.is_over = true;
                    let message = format!(
                        "a request of id {:?} that is not this one is known to the server",
                        self.id
                    );
                    return Err(Error::new(Code::AlreadyExists, message));
                }
            }
        }
        Ok(!std::mem::replace(&mut self.is_accepted, true))
    }

    fn take_delta(&mut self, delta: &mut Delta) -> Result<bool, Error> {
        let index = delta.index;
        self.received.entry(index).or_default().take(delta).map_err(|refusal| match refusal {
            Refusal::Missing(error) => error,
            Refusal::Differs(how) => {
                let message = format!(
                    "request {:?} was computed anew, and answer {index} is not the one that had \
                     begun: {how}; the servers there are not set up alike",
                    self.id
                );
                Error::new(Code::DataLoss, message)
            }
        })
    }

    fn take_finished(&mut self, finished: &Finished) -> bool {
        if self.was_unread(finished) {
            self.is_unread = true;
            return false;
        }
        let is_new = self.received.entry(finished.index).or_default().finish();
        let num_finished = self.received.values().filter(|received| received.is_finished).count();
        self.is_over = num_finished == self.num_choices as usize;
        is_new
    }

    /// Its end is that nobody read it for as long as its attach window: to be sent anew.
    fn was_unread(&self, finished: &Finished) -> bool {
        let window = self.request.as_ref().map(|request| request.attach_window_ms.unwrap_or(0));
        let is_cancelled = finished.finish_reason == FinishReason::Cancelled as i32;
        self.way != Way::Send
            && is_cancelled
            && window.map_or(false, |ms| self.silence >= Duration::from_millis(ms.into()))
    }

    fn take_prompt_logprobs(&mut self, part: &mut PromptLogprobs) -> bool {
        let num_known = self.next_prompt.saturating_sub(part.first_token_index);
        part.logprobs.drain(..part.logprobs.len().min(num_known as usize));
        part.first_token_index += num_known;
        let next = part.first_token_index + part.logprobs.len() as u32;
        self.next_prompt = self.next_prompt.max(next);
        !part.logprobs.is_empty()
    }
}

/// With what makes it the same request when it is sent anew, or read on.
fn named(mut request: GenerateRequest, reconnects: bool) -> GenerateRequest {
    let id = || format!("{:016x}{:016x}", random_bits(), random_bits());
    request.request_id.get_or_insert_with(id);
    request.sampling.get_or_insert_with(Default::default).seed.get_or_insert_with(random_bits);
    if reconnects {
        request.attach_window_ms.get_or_insert(ATTACH_WINDOW_MS);
    }
    request
}

fn random_bits() -> u64 {
    let mut bytes = [0; 8];
    getrandom::getrandom(&mut bytes).expect("the system has random numbers");
    u64::from_ne_bytes(bytes)
}
