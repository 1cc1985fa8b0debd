//! What came of one choice, and where in it the present stream is.

use crate::error::{Code, Error};
use crate::v1::{Delta, ToolCallDelta};

/// Why a delta cannot be taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The stream repeats what came otherwise.
    Differs(String),
    Missing(Error),
}

/// A stream that begins again, at the first token or behind the last one that came, repeats a part:
/// it is compared and left out. The text behind a token depends on the tokens up to it alone; what
/// was held back until the end comes after the last one.
#[derive(Default)]
pub(crate) struct Received {
    pub is_finished: bool,
    /// Of the first token that is looked at; those before it are not known.
    first_index: u32,
    /// Of the present stream's next token.
    at: u32,
    token_ids: Vec<u32>,
    text: Text,
    reasoning: Text,
    calls: Vec<Call>,
}

impl Received {
    pub fn from(first_index: u32) -> Self {
        Self { first_index, at: first_index, ..Self::default() }
    }

    pub fn num_tokens(&self) -> u32 {
        self.first_index + self.token_ids.len() as u32
    }

    /// Another stream follows: from the start, or from token `num_tokens` on.
    pub fn rewind(&mut self, to_start: bool) {
        self.at = if to_start { self.first_index } else { self.num_tokens() };
        self.text.rewind(to_start);
        self.reasoning.rewind(to_start);
        for call in &mut self.calls {
            call.is_open = !to_start && call.mark;
            call.arguments.rewind(to_start);
        }
    }

    /// Cuts the delta to what is new; whether anything is.
    pub fn take(&mut self, delta: &mut Delta) -> Result<bool, Refusal> {
        let has_tokens = !delta.token_ids.is_empty();
        self.take_tokens(delta)?;
        self.text.take(&mut delta.text)?;
        self.reasoning.take(&mut delta.reasoning_text)?;
        self.take_calls(delta)?;
        if has_tokens && self.at == self.num_tokens() {
            self.text.mark();
            self.reasoning.mark();
            for call in &mut self.calls {
                call.mark = call.is_open;
                call.arguments.mark();
            }
        }
        Ok(!delta.token_ids.is_empty()
            || !delta.text.is_empty()
            || !delta.reasoning_text.is_empty()
            || !delta.tool_calls.is_empty())
    }

    /// Its last message came; false: once more.
    pub fn finish(&mut self) -> bool {
        !std::mem::replace(&mut self.is_finished, true)
    }

    fn take_tokens(&mut self, delta: &mut Delta) -> Result<(), Refusal> {
        if delta.token_ids.is_empty() {
            return Ok(());
        }
        if delta.first_token_index != self.at {
            return Err(missing(delta, format!("token {}", self.at)));
        }
        let known = &self.token_ids[(self.at - self.first_index) as usize..];
        for (index, (new, old)) in (self.at..).zip(delta.token_ids.iter().zip(known)) {
            if new != old {
                return Err(Refusal::Differs(format!("token {index} is {new} and was {old}")));
            }
        }
        let num_known = known.len().min(delta.token_ids.len());
        self.at += delta.token_ids.len() as u32;
        delta.token_ids.drain(..num_known);
        delta.logprobs.drain(..num_known.min(delta.logprobs.len()));
        delta.first_token_index += num_known as u32;
        self.token_ids.extend(&delta.token_ids);
        Ok(())
    }

    fn take_calls(&mut self, delta: &mut Delta) -> Result<(), Refusal> {
        for mut part in std::mem::take(&mut delta.tool_calls) {
            if part.index as usize > self.calls.len() {
                return Err(missing(delta, format!("tool call {}", self.calls.len())));
            }
            if self.take_call(&mut part)? {
                delta.tool_calls.push(part);
            }
        }
        Ok(())
    }

    /// Cuts a part to what is new; whether anything is. The id that came first stays.
    fn take_call(&mut self, part: &mut ToolCallDelta) -> Result<bool, Refusal> {
        let index = part.index as usize;
        let is_new = index == self.calls.len();
        if is_new {
            self.calls.push(Call { name: part.name.clone(), is_open: true, ..Call::default() });
        }
        let call = &mut self.calls[index];
        if !call.is_open {
            if part.name != call.name {
                let (new, old) = (&part.name, &call.name);
                return Err(Refusal::Differs(format!(
                    "tool call {index} is {new:?} and was {old:?}"
                )));
            }
            part.id.clear();
            part.name.clear();
            call.is_open = true;
        }
        call.arguments.take(&mut part.arguments_json)?;
        Ok(is_new || !part.arguments_json.is_empty())
    }
}

fn missing(delta: &Delta, what: String) -> Refusal {
    let message = format!("{what} is missing in the stream of choice {}", delta.index);
    Refusal::Missing(Error::new(Code::Internal, message))
}

#[derive(Default)]
struct Call {
    name: String,
    arguments: Text,
    /// The present stream has told of it; and had at the last token.
    is_open: bool,
    mark: bool,
}

/// A text as it came, how far the present stream is in it, and how far it was at the last token.
#[derive(Default)]
struct Text {
    whole: String,
    at: usize,
    mark: usize,
}

impl Text {
    fn rewind(&mut self, to_start: bool) {
        self.at = if to_start { 0 } else { self.mark };
    }

    fn mark(&mut self) {
        self.mark = self.at;
    }

    /// Cuts a piece of the stream to what is new.
    fn take(&mut self, piece: &mut String) -> Result<(), Refusal> {
        let known = &self.whole[self.at..];
        let num_known = known.len().min(piece.len());
        if known.as_bytes()[..num_known] != piece.as_bytes()[..num_known] {
            return Err(Refusal::Differs(format!("the text has {piece:?} where it had {known:?}")));
        }
        self.at += piece.len();
        piece.drain(..num_known);
        self.whole.push_str(piece);
        Ok(())
    }
}
