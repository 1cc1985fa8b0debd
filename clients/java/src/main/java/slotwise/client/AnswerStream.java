package slotwise.client;

import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import slotwise.v1.InferenceGrpc;
import slotwise.v1.InferenceOuterClass.AttachRequest;
import slotwise.v1.InferenceOuterClass.CompleteChoice;
import slotwise.v1.InferenceOuterClass.CompleteResponse;
import slotwise.v1.InferenceOuterClass.GenerateRequest;
import slotwise.v1.InferenceOuterClass.GenerateResponse;

/**
 * The events of one request as they come: Accepted, Deltas, a Finished for each choice.
 *
 * <p>One thread reads; any may close. What fails is thrown as a {@link SlotwiseException}.
 */
public final class AnswerStream implements Iterator<GenerateResponse>, AutoCloseable {
  private final SlotwiseClient client;
  private final Reading reading;
  // Null: none.
  private final Deadline deadline;
  private final Context.CancellableContext context = Context.ROOT.withCancellation();
  private final CountDownLatch closed = new CountDownLatch(1);
  private final AtomicBoolean isClosed = new AtomicBoolean();
  private Iterator<GenerateResponse> call;
  private GenerateResponse next;
  private boolean hasEnded;

  AnswerStream(SlotwiseClient client, Reading reading, Deadline deadline) {
    this.client = client;
    this.reading = reading;
    this.deadline = deadline;
    open();
  }

  /** The request's name, for cancel and attach. */
  public String requestId() {
    return reading.id();
  }

  /** Waits for the next event. */
  @Override
  public boolean hasNext() {
    while (next == null && !hasEnded) {
      GenerateResponse response = receive();
      if (response != null) {
        next = take(response);
      }
    }
    return next != null;
  }

  @Override
  public GenerateResponse next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    GenerateResponse event = next;
    next = null;
    return event;
  }

  /** Reads the stream to its end, from its first event on, as one answer. */
  CompleteResponse gather() {
    CompleteResponse.Builder whole = CompleteResponse.newBuilder().setRequestId(requestId());
    Map<Integer, CompleteChoice.Builder> ends = new TreeMap<>();
    while (hasNext()) {
      GenerateResponse event = next();
      switch (event.getEventCase()) {
        case ACCEPTED -> whole.setAccepted(event.getAccepted());
        case PROMPT_LOGPROBS ->
            whole.addAllPromptLogprobs(event.getPromptLogprobs().getLogprobsList());
        case DELTA ->
            end(ends, event.getDelta().getIndex())
                .addAllLogprobs(event.getDelta().getLogprobsList());
        case FINISHED ->
            end(ends, event.getFinished().getIndex()).setFinished(event.getFinished());
        default -> { }
      }
    }
    ends.forEach((index, end) -> {
      CompleteChoice.Builder choice = reading.received().get(index).whole();
      whole.addChoices(choice.mergeFrom(end.build()).setIndex(index));
    });
    return whole.build();
  }

  private static CompleteChoice.Builder end(Map<Integer, CompleteChoice.Builder> ends, int index) {
    return ends.computeIfAbsent(index, i -> CompleteChoice.newBuilder());
  }

  /** Ends the request, if it still runs; returns when the server knows, or after a second. */
  @Override
  public void close() {
    if (stop() && !reading.isOver()) {
      client.end(reading.id());
    }
  }

  /** Stops reading and lets the request run, for its attach window, for {@code attach}. */
  public void detach() {
    stop();
  }

  private boolean stop() {
    closed.countDown();
    context.cancel(null);
    return isClosed.compareAndSet(false, true);
  }

  /** The next message; null: there is none, and the stream goes on or has ended. */
  private GenerateResponse receive() {
    try {
      if (call.hasNext()) {
        client.reached();
        return call.next();
      }
      if (reading.ended()) {
        hasEnded = true;
        return null;
      }
      goOn(null);
    } catch (StatusRuntimeException error) {
      if (reading.isOver()) {
        hasEnded = true;
        return null;
      }
      if (Thread.currentThread().isInterrupted()) {
        close();
        hasEnded = true;
        throw SlotwiseException.of(Status.Code.CANCELLED, "the thread that reads was interrupted");
      }
      if (isClosed.get()) {
        hasEnded = true;
        throw SlotwiseException.of(Status.Code.CANCELLED, "the stream was closed");
      }
      goOn(SlotwiseException.of(error, client.address()));
    }
    return null;
  }

  private GenerateResponse take(GenerateResponse response) {
    try {
      return reading.take(response);
    } catch (SlotwiseException error) {
      // A new run that is not the same one is nobody's.
      hasEnded = true;
      close();
      throw error;
    }
  }

  private void goOn(SlotwiseException error) {
    try {
      long delay = reading.lost(error, client.wasReached());
      if (deadline != null) {
        delay = Math.min(delay, Math.max(0, deadline.timeRemaining(TimeUnit.NANOSECONDS)));
      }
      closed.await(delay, TimeUnit.NANOSECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      close();
    } catch (SlotwiseException end) {
      hasEnded = true;
      throw end;
    }
    client.dialAgain();
    open();
  }

  private void open() {
    InferenceGrpc.InferenceBlockingStub stub = client.inference();
    if (deadline != null) {
      stub = stub.withDeadline(deadline);
    }
    Object request = reading.nextCall();
    Context previous = context.attach();
    try {
      call =
          request instanceof GenerateRequest generate
              ? stub.generate(generate)
              : stub.attach((AttachRequest) request);
    } finally {
      context.detach(previous);
    }
  }
}
