package slotwise.client;

import io.grpc.Status.Code;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;
import java.util.function.LongSupplier;
import slotwise.v1.InferenceOuterClass.Accepted;
import slotwise.v1.InferenceOuterClass.AttachRequest;
import slotwise.v1.InferenceOuterClass.Delta;
import slotwise.v1.InferenceOuterClass.FinishReason;
import slotwise.v1.InferenceOuterClass.Finished;
import slotwise.v1.InferenceOuterClass.GenerateRequest;
import slotwise.v1.InferenceOuterClass.GenerateResponse;
import slotwise.v1.InferenceOuterClass.PromptLogprobs;

/**
 * A request as its reader sees it: what came, and how to go on when the stream is lost.
 *
 * <p>The request has an id and a seed from the start: sent anew, it is the same one. What a new run
 * repeats is compared with what came, and not told again. Times are in nanoseconds.
 */
final class Reading {
  // Within what a server allows by default; a request that nobody reads for longer ends.
  private static final int ATTACH_WINDOW_MS = 30_000;
  private static final long FIRST_DELAY = Duration.ofMillis(100).toNanos();
  private static final long MAX_DELAY = Duration.ofSeconds(2).toNanos();

  private enum Way {
    NONE,
    SEND,
    ATTACH,
    /** From the first token on, which are compared with those that came. */
    ATTACH_TO_ALL,
    /** In the place of the first sending: the server takes no attach window. */
    SEND_PLAIN
  }

  private final String id;
  // For how long it is tried without news.
  private final long patience;
  private final LongSupplier clock;
  private final List<Received> received = new ArrayList<>();
  // Null where only the id is known.
  private GenerateRequest request;
  // The attach window is not the caller's wish.
  private boolean ownWindow;
  private Way way;
  private Accepted accepted;
  // 0: not known yet.
  private int numChoices;
  private int nextPrompt;
  private int numSent;
  private volatile boolean isOver;
  private long delay = FIRST_DELAY;
  // The present stream has begun, and when.
  private boolean isHeard;
  private long beganAt;
  // There is no stream, and since when; for how long there was none since the last news.
  private boolean isLost;
  private long lostAt;
  private long lostFor;
  private SlotwiseException failure;
  // When the server can last have known that somebody reads, and how long ago that was.
  private long heardAt;
  private long silence;
  private boolean wasSlow;
  private boolean isUnread;

  Reading(GenerateRequest wanted, Duration patience, LongSupplier clock) {
    this(patience, clock, Way.SEND, named(wanted, !patience.isZero()));
    ownWindow = request.hasAttachWindowMs() && !wanted.hasAttachWindowMs();
    numChoices = Math.max(request.getN(), 1);
  }

  Reading(AttachRequest where, Duration patience, LongSupplier clock) {
    this(patience, clock, Way.ATTACH, where.getRequestId());
    received.add(new Received(where.getNextTokenIndex()));
    where.getOtherNextTokenIndicesList().forEach(next -> received.add(new Received(next)));
    nextPrompt = where.getNextPromptTokenIndex();
  }

  private Reading(Duration patience, LongSupplier clock, Way way, GenerateRequest request) {
    this(patience, clock, way, request.getRequestId());
    this.request = request;
  }

  private Reading(Duration patience, LongSupplier clock, Way way, String id) {
    this.id = id;
    this.patience = patience.toNanos();
    this.clock = clock;
    this.way = way;
    this.beganAt = clock.getAsLong();
    this.heardAt = beganAt;
  }

  /** With what makes it the same request when it is sent anew. */
  private static GenerateRequest named(GenerateRequest wanted, boolean reconnects) {
    GenerateRequest.Builder named = wanted.toBuilder();
    if (!named.hasRequestId()) {
      named.setRequestId(UUID.randomUUID().toString());
    }
    if (!named.getSampling().hasSeed()) {
      named.getSamplingBuilder().setSeed(new SecureRandom().nextLong());
    }
    if (!named.hasAttachWindowMs() && reconnects) {
      named.setAttachWindowMs(ATTACH_WINDOW_MS);
    }
    return named.build();
  }

  String id() {
    return id;
  }

  /** Nothing is left to cancel. */
  boolean isOver() {
    return isOver;
  }

  /** The stream ended without an error; whether nothing is missing. */
  boolean ended() {
    // How many answers an attached request has may not be known here.
    isOver = isOver || request == null;
    return isOver;
  }

  /** The request of the next stream: a GenerateRequest or an AttachRequest. */
  Object nextCall() {
    isHeard = false;
    received.forEach(one -> one.rewind(way != Way.ATTACH));
    if (way == Way.SEND) {
      numSent++;
      return request;
    }
    silence = wasSlow ? Long.MAX_VALUE : clock.getAsLong() - heardAt;
    AttachRequest.Builder attach = AttachRequest.newBuilder().setRequestId(id);
    if (way == Way.ATTACH) {
      attach.setNextTokenIndex(choice(0).numTokens()).setNextPromptTokenIndex(nextPrompt);
      received.stream()
          .skip(1)
          .forEach(other -> attach.addOtherNextTokenIndices(other.numTokens()));
    }
    return attach.build();
  }

  /** What is new of a message; null: nothing. */
  GenerateResponse take(GenerateResponse response) {
    heardAt = clock.getAsLong();
    wasSlow = false;
    GenerateResponse told =
        switch (response.getEventCase()) {
          case ACCEPTED -> takeAccepted(response.getAccepted()) ? response : null;
          case DELTA -> takeDelta(response);
          case FINISHED -> takeFinished(response.getFinished()) ? response : null;
          case PROMPT_LOGPROBS -> takePromptLogprobs(response);
          case EVENT_NOT_SET -> null;
        };
    if (told != null && !told.hasAccepted()) {
      lostFor = 0;
      delay = FIRST_DELAY;
      failure = null;
    }
    return told;
  }

  /**
   * A stream ended with an error, or without one (null) before its last message. How long to wait
   * before {@link #nextCall}; throws the error where the request has come to its end.
   */
  long lost(SlotwiseException error, boolean wasReached) {
    long now = clock.getAsLong();
    // Time with a server counts back, also where it had no news yet.
    lostFor = isLost ? lostFor + now - lostAt : Math.max(0, lostFor - (now - beganAt));
    isLost = true;
    lostAt = now;
    failure = explained(error);
    way = wayOn(failure, error == null || error.isLoss(), wasReached);
    if (way == Way.SEND_PLAIN) {
      request = request.toBuilder().clearAttachWindowMs().build();
      numSent--;
      way = Way.SEND;
      return 0;
    }
    long wait = Math.max(delay, failure.retryAfter().toNanos());
    if (way == Way.NONE || lostFor + wait > patience) {
      isOver = true;
      throw failure;
    }
    delay = Math.min(2 * delay, MAX_DELAY);
    return wait;
  }

  private SlotwiseException explained(SlotwiseException error) {
    if (error == null) {
      String text = "the stream of request " + id + " ended before its answer did";
      return SlotwiseException.of(Code.INTERNAL, text);
    }
    if (error.code() == Code.DEADLINE_EXCEEDED && failure != null) {
      String before = failure.getStatus().getDescription();
      return SlotwiseException.of(
          Code.DEADLINE_EXCEEDED, "the deadline passed; before that: " + before);
    }
    return error;
  }

  private Way wayOn(SlotwiseException error, boolean isLoss, boolean wasReached) {
    boolean attached = way != Way.SEND;
    Way again = accepted == null && request != null ? Way.SEND : Way.ATTACH;
    if (isUnread) {
      isUnread = false;
      return Way.SEND;
    }
    if (error.reason().equals("SLOW_READER")) {
      // Nobody read since long before its last messages were taken here.
      wasSlow = true;
      return Way.ATTACH;
    }
    if (isLoss) {
      return wasReached ? again : Way.NONE;
    }
    if (request == null) {
      return error.code() == Code.UNAVAILABLE ? Way.ATTACH : Way.NONE;
    }
    if (attached && error.reason().equals("EXPIRED_REQUEST")) {
      return Way.SEND;
    }
    return switch (error.code()) {
        // After Accepted it is the request's own end: given up there, but not elsewhere. Else the
        // server starts or drains.
      case UNAVAILABLE -> attached && isHeard ? Way.SEND : again;
      case NOT_FOUND, UNIMPLEMENTED -> attached ? Way.SEND : Way.NONE;
      case OUT_OF_RANGE -> way == Way.ATTACH ? Way.ATTACH_TO_ALL : Way.NONE;
      case ALREADY_EXISTS -> numSent > 1 && !attached ? Way.ATTACH : Way.NONE;
      case RESOURCE_EXHAUSTED -> accepted != null ? way : Way.NONE;
      case INVALID_ARGUMENT -> isWindowRefused(error) ? Way.SEND_PLAIN : Way.NONE;
      default -> Way.NONE;
    };
  }

  private boolean isWindowRefused(SlotwiseException error) {
    boolean isField = error.field().equals("attach_window_ms");
    return isField && ownWindow && request.hasAttachWindowMs();
  }

  private boolean takeAccepted(Accepted now) {
    isHeard = true;
    beganAt = clock.getAsLong();
    if (numChoices == 0) {
      numChoices = now.getNumChoices();
    }
    if (isLost) {
      lostFor += beganAt - lostAt;
      isLost = false;
    }
    boolean isAgain = request != null && (accepted != null || numSent > 1);
    if (isAgain && now.getSeed() != request.getSampling().getSeed()) {
      // An id of the caller's may be that of another request of theirs.
      isOver = true;
      throw SlotwiseException.of(
          Code.ALREADY_EXISTS,
          "a request of id " + id + " that is not this one is known to the server");
    }
    if (accepted != null) {
      return false;
    }
    accepted = now;
    if (request == null) {
      delay = FIRST_DELAY;
    }
    return true;
  }

  private GenerateResponse takeDelta(GenerateResponse response) {
    Delta delta = response.getDelta();
    Delta cut = choice(delta.getIndex()).take(delta);
    return cut == null ? null : response.toBuilder().setDelta(cut).build();
  }

  private boolean takeFinished(Finished finished) {
    if (wasUnread(finished)) {
      isUnread = true;
      return false;
    }
    boolean isNew = choice(finished.getIndex()).finish();
    isOver = received.stream().filter(Received::isFinished).count() == numChoices;
    return isNew;
  }

  /** Its end is that nobody read it for as long as its attach window: to be sent anew. */
  private boolean wasUnread(Finished finished) {
    if (request == null || way == Way.SEND) {
      return false;
    }
    boolean isCancelled = finished.getFinishReason() == FinishReason.FINISH_REASON_CANCELLED;
    return isCancelled && silence >= Duration.ofMillis(request.getAttachWindowMs()).toNanos();
  }

  private GenerateResponse takePromptLogprobs(GenerateResponse response) {
    PromptLogprobs part = response.getPromptLogprobs();
    int end = part.getFirstTokenIndex() + part.getLogprobsCount();
    int numKnown = Math.max(0, nextPrompt - part.getFirstTokenIndex());
    nextPrompt = Math.max(nextPrompt, end);
    if (numKnown >= part.getLogprobsCount()) {
      return null;
    }
    var rows = part.getLogprobsList().subList(numKnown, part.getLogprobsCount());
    PromptLogprobs.Builder cut =
        PromptLogprobs.newBuilder().setFirstTokenIndex(end - rows.size()).addAllLogprobs(rows);
    return response.toBuilder().setPromptLogprobs(cut).build();
  }

  /** Of each answer, what came. */
  List<Received> received() {
    return received;
  }

  /** What came of one answer; those before it are there too. */
  private Received choice(int index) {
    while (received.size() <= index) {
      received.add(new Received(0));
    }
    return received.get(index);
  }
}
