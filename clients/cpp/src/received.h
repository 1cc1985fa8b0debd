#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "slotwise/v1/inference.pb.h"

namespace slotwise {

// A stream repeats what came otherwise.
class Difference : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A text as it came, how far the present stream is in it, and how far it was at the last token.
class ReceivedText {
 public:
  void rewind(bool to_start) { at_ = to_start ? 0 : mark_; }
  void mark() { mark_ = at_; }
  // Cuts a piece of the stream to what is new.
  void take(std::string* piece);

 private:
  std::string whole_;
  size_t at_ = 0;
  size_t mark_ = 0;
};

// What came of one choice, and where in it the present stream is. A stream that begins again, at
// the first token or behind the last one that came, repeats a part: it is compared and left out.
// The text behind a token depends on the tokens up to it alone; what was held back until the end
// comes after the last one.
class Received {
 public:
  // first_index: of the first token that is looked at; those before it are not known.
  explicit Received(uint32_t first_index = 0) : first_index_(first_index), at_(first_index) {}

  uint32_t num_tokens() const { return first_index_ + static_cast<uint32_t>(token_ids_.size()); }
  bool is_finished() const { return is_finished_; }
  // Another stream follows: from the start, or from token num_tokens() on.
  void rewind(bool to_start);
  // Cuts the delta to what is new; whether anything is. Difference; Error INTERNAL for a gap.
  bool take(v1::Delta* delta);
  // Its last message came; false: once more.
  bool finish();

 private:
  struct Call {
    std::string name;
    ReceivedText arguments;
    // The present stream has told of it; and had at the last token.
    bool is_open = false;
    bool mark = false;
  };

  void take_tokens(v1::Delta* delta);
  void take_calls(v1::Delta* delta);
  bool take_call(v1::ToolCallDelta* part);

  uint32_t first_index_;
  // Of the present stream's next token.
  uint32_t at_;
  std::vector<uint32_t> token_ids_;
  ReceivedText text_, reasoning_;
  std::vector<Call> calls_;
  bool is_finished_ = false;
};

}  // namespace slotwise
