package slotwise.client;

import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import slotwise.v1.InferenceOuterClass.CompleteChoice;
import slotwise.v1.InferenceOuterClass.Delta;
import slotwise.v1.InferenceOuterClass.ToolCall;
import slotwise.v1.InferenceOuterClass.ToolCallDelta;

/**
 * What came of one answer, and where in it the present stream is.
 *
 * <p>A stream that begins again, at the first token or behind the last one that came, repeats a
 * part; {@link #take} compares it and cuts it off. A server's text behind a token depends on the
 * tokens up to it alone; what was held back until the end comes after the last token.
 */
final class Received {
  // Tokens before it are not known here.
  private final int firstIndex;
  private final List<Integer> tokenIds = new ArrayList<>();
  private final Text text = new Text();
  private final Text reasoning = new Text();
  private final List<Call> calls = new ArrayList<>();
  // Of the present stream, the next token in the same count.
  private int token;
  private boolean isFinished;

  Received(int firstIndex) {
    this.firstIndex = firstIndex;
    this.token = firstIndex;
  }

  /** Tokens that came, those before the first index included. */
  int numTokens() {
    return firstIndex + tokenIds.size();
  }

  boolean isFinished() {
    return isFinished;
  }

  /** Another stream follows: from the start, or from token {@link #numTokens} on. */
  void rewind(boolean toStart) {
    token = toStart ? firstIndex : numTokens();
    text.rewind(toStart);
    reasoning.rewind(toStart);
    calls.forEach(call -> call.rewind(toStart));
  }

  /** What is new of a delta; null: nothing. DATA_LOSS for another answer, INTERNAL for a gap. */
  Delta take(Delta delta) {
    Delta.Builder cut = delta.toBuilder();
    takeTokens(delta, cut);
    cut.setText(text.take(delta.getText(), "text"));
    cut.setReasoningText(reasoning.take(delta.getReasoningText(), "reasoning"));
    takeCalls(delta, cut);
    if (delta.getTokenIdsCount() > 0 && token == numTokens()) {
      // The last token came with what the present stream has told.
      text.mark();
      reasoning.mark();
      calls.forEach(Call::mark);
    }
    boolean isText = !cut.getText().isEmpty() || !cut.getReasoningText().isEmpty();
    return isText || cut.getTokenIdsCount() + cut.getToolCallsCount() > 0 ? cut.build() : null;
  }

  /** The last message came; whether for the first time. */
  boolean finish() {
    boolean wasFinished = isFinished;
    isFinished = true;
    return !wasFinished;
  }

  /** The answer so far, without its logprobs. */
  CompleteChoice.Builder whole() {
    CompleteChoice.Builder choice =
        CompleteChoice.newBuilder()
            .addAllTokenIds(tokenIds)
            .setText(text.whole.toString())
            .setReasoningText(reasoning.whole.toString());
    calls.forEach(call -> choice.addToolCalls(call.whole()));
    return choice;
  }

  private void takeTokens(Delta delta, Delta.Builder cut) {
    if (delta.getTokenIdsCount() == 0) {
      return;
    }
    if (delta.getFirstTokenIndex() != token) {
      throw SlotwiseException.of(
          Status.Code.INTERNAL,
          "tokens are missing in the stream of choice %d: it goes on at %d and had come to %d"
              .formatted(delta.getIndex(), delta.getFirstTokenIndex(), token));
    }
    int numKnown = Math.min(numTokens() - token, delta.getTokenIdsCount());
    for (int i = 0; i < numKnown; i++) {
      int old = tokenIds.get(token - firstIndex + i);
      if (delta.getTokenIds(i) != old) {
        throw differs("token %d is %d and was %d", token + i, delta.getTokenIds(i), old);
      }
    }
    token += delta.getTokenIdsCount();
    List<Integer> added = delta.getTokenIdsList().subList(numKnown, delta.getTokenIdsCount());
    tokenIds.addAll(added);
    if (numKnown > 0) {
      cut.setFirstTokenIndex(delta.getFirstTokenIndex() + numKnown);
      cut.clearTokenIds().addAllTokenIds(added);
      if (delta.getLogprobsCount() > 0) {
        var rows = delta.getLogprobsList().subList(numKnown, delta.getLogprobsCount());
        cut.clearLogprobs().addAllLogprobs(rows);
      }
    }
  }

  private void takeCalls(Delta delta, Delta.Builder cut) {
    if (delta.getToolCallsCount() == 0) {
      return;
    }
    cut.clearToolCalls();
    for (ToolCallDelta part : delta.getToolCallsList()) {
      if (part.getIndex() == calls.size()) {
        calls.add(new Call(part.getId(), part.getName()));
      }
      if (part.getIndex() > calls.size()) {
        throw SlotwiseException.of(
            Status.Code.INTERNAL,
            "a part of tool call %d came and call %d had not"
                .formatted(part.getIndex(), calls.size()));
      }
      ToolCallDelta added = calls.get(part.getIndex()).take(part);
      if (added != null) {
        cut.addToolCalls(added);
      }
    }
  }

  private static SlotwiseException differs(String format, Object... values) {
    return SlotwiseException.of(
        Status.Code.DATA_LOSS,
        "the answer was computed anew and is not the one that had begun: "
            + format.formatted(values)
            + "; are the servers behind the address set up alike?");
  }

  /** A text as it came, how far the present stream is in it, and how far the last token's was. */
  private static final class Text {
    private final StringBuilder whole = new StringBuilder();
    private int at;
    private int mark;

    void mark() {
      mark = at;
    }

    void rewind(boolean toStart) {
      at = toStart ? 0 : mark;
    }

    /** What is new of the stream's next piece. */
    String take(String piece, String name) {
      int numKnown = Math.min(whole.length() - at, piece.length());
      String known = whole.substring(at, at + numKnown);
      String head = piece.substring(0, numKnown);
      if (!head.equals(known)) {
        throw differs("the %s has \"%s\" where it had \"%s\"", name, head, known);
      }
      at += piece.length();
      String added = piece.substring(numKnown);
      whole.append(added);
      return added;
    }
  }

  /** A tool call as it came. */
  private static final class Call {
    private final String id;
    private final String name;
    private final Text arguments = new Text();
    private boolean wasTold;
    // The present stream has told of it; and had when the last token came.
    private boolean isOpen;
    private boolean mark;

    Call(String id, String name) {
      this.id = id;
      this.name = name;
    }

    ToolCall whole() {
      return ToolCall.newBuilder()
          .setId(id)
          .setName(name)
          .setArgumentsJson(arguments.whole.toString())
          .build();
    }

    void mark() {
      mark = isOpen;
      arguments.mark();
    }

    void rewind(boolean toStart) {
      isOpen = mark && !toStart;
      arguments.rewind(toStart);
    }

    /** What is new of a part; null: nothing. The id that came first stays. */
    ToolCallDelta take(ToolCallDelta part) {
      boolean isRepeated = wasTold && !isOpen;
      boolean isNew = !wasTold;
      isOpen = true;
      wasTold = true;
      ToolCallDelta.Builder cut = part.toBuilder();
      if (isRepeated) {
        if (!part.getName().equals(name)) {
          throw differs("tool call %d is %s and was %s", part.getIndex(), part.getName(), name);
        }
        cut.clearId().clearName();
      }
      cut.setArgumentsJson(arguments.take(part.getArgumentsJson(), "tool call"));
      return isNew || !cut.getArgumentsJson().isEmpty() ? cut.build() : null;
    }
  }
}
