package slotwise.client;

import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.Deadline;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.ProtoUtils;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import slotwise.standard.Standard.HealthCheckRequest;
import slotwise.standard.Standard.HealthCheckResponse;
import slotwise.v1.InferenceGrpc;
import slotwise.v1.InferenceOuterClass.AttachRequest;
import slotwise.v1.InferenceOuterClass.CancelRequest;
import slotwise.v1.InferenceOuterClass.Chat;
import slotwise.v1.InferenceOuterClass.ChatMessage;
import slotwise.v1.InferenceOuterClass.CompleteResponse;
import slotwise.v1.InferenceOuterClass.GenerateRequest;

/** A connection to one server, for use by any number of threads. */
public final class SlotwiseClient implements AutoCloseable {
  /** The health name of a server that is ready; "" is that of its process. */
  public static final String SERVICE = InferenceGrpc.SERVICE_NAME;

  private static final int MAX_MESSAGE_BYTES = 64 << 20;
  // For how long the end of a stream waits until the server knows of it.
  private static final long CANCEL_TIMEOUT_MS = 1_000;
  private static final MethodDescriptor<HealthCheckRequest, HealthCheckResponse> HEALTH_CHECK =
      MethodDescriptor.<HealthCheckRequest, HealthCheckResponse>newBuilder()
          .setType(MethodDescriptor.MethodType.UNARY)
          .setFullMethodName("grpc.health.v1.Health/Check")
          .setRequestMarshaller(ProtoUtils.marshaller(HealthCheckRequest.getDefaultInstance()))
          .setResponseMarshaller(ProtoUtils.marshaller(HealthCheckResponse.getDefaultInstance()))
          .build();

  private final String address;
  private final Duration patience;
  private final ManagedChannel channel;
  private final InferenceGrpc.InferenceBlockingStub inference;
  // It has answered once: what is lost now may come back.
  private volatile boolean wasReached;

  /** Without TLS and token; the first call tells whether there is a server. */
  public SlotwiseClient(String address) {
    this(builder(address));
  }

  private SlotwiseClient(Builder builder) {
    address = builder.address;
    patience = builder.patience;
    ManagedChannelBuilder<?> made =
        Grpc.newChannelBuilder(address, builder.credentials)
            .maxInboundMessageSize(MAX_MESSAGE_BYTES)
            .keepAliveTime(10, TimeUnit.SECONDS)
            .keepAliveTimeout(10, TimeUnit.SECONDS)
            // This client sends again what was lost, and knows when that is right.
            .disableRetry();
    if (builder.token != null) {
      Metadata headers = new Metadata();
      headers.put(
          Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER),
          "Bearer " + builder.token);
      made.intercept(MetadataUtils.newAttachHeadersInterceptor(headers));
    }
    channel = made.build();
    inference = InferenceGrpc.newBlockingStub(channel);
  }

  /** An address such as "127.0.0.1:50051". */
  public static Builder builder(String address) {
    return new Builder(address);
  }

  /** All calls of the API, as generated; these do not reconnect. */
  public InferenceGrpc.InferenceBlockingStub inference() {
    return inference;
  }

  /**
   * Asks a question by the model's chat template and streams the answer; {@code options} is the rest
   * of the request.
   */
  public AnswerStream chat(String question, GenerateRequest options) {
    ChatMessage user = ChatMessage.newBuilder().setRole("user").setContent(question).build();
    Chat chat = Chat.newBuilder().addMessages(user).build();
    return generate(options.toBuilder().setChat(chat).build(), null);
  }

  /**
   * Starts a request and streams its events. It goes on by itself when its connection, or the
   * server, is lost and comes back: each token comes exactly once. A null timeout is none.
   */
  public AnswerStream generate(GenerateRequest request, Duration timeout) {
    return stream(new Reading(request, patience, System::nanoTime), timeout);
  }

  /** {@link #generate}, answered whole. */
  public CompleteResponse complete(GenerateRequest request, Duration timeout) {
    try (AnswerStream stream = generate(request, timeout)) {
      return stream.gather();
    }
  }

  /** Reads a request on, from any connection: one that runs, or ended not long ago. */
  public AnswerStream attach(AttachRequest where, Duration timeout) {
    return stream(new Reading(where, patience, System::nanoTime), timeout);
  }

  /** Stops a request of any connection; NOT_FOUND where none of that id waits or runs. */
  public void cancel(String requestId) {
    try {
      inference.cancel(CancelRequest.newBuilder().setRequestId(requestId).build());
      wasReached = true;
    } catch (StatusRuntimeException error) {
      throw SlotwiseException.of(error, address);
    }
  }

  /** Of {@link #SERVICE}, "", or "slotwise.worker/RANK"; NOT_FOUND for a name not known (yet). */
  public HealthCheckResponse.ServingStatus health(String service, Duration timeout) {
    HealthCheckRequest request = HealthCheckRequest.newBuilder().setService(service).build();
    CallOptions options = CallOptions.DEFAULT.withDeadline(deadline(timeout));
    try {
      var response = ClientCalls.blockingUnaryCall(channel, HEALTH_CHECK, options, request);
      wasReached = true;
      return response.getStatus();
    } catch (StatusRuntimeException error) {
      throw SlotwiseException.of(error, address);
    }
  }

  /** Ends the connection. Streams that are open are to be closed before. */
  @Override
  public void close() {
    channel.shutdownNow();
  }

  private AnswerStream stream(Reading reading, Duration timeout) {
    return new AnswerStream(this, reading, deadline(timeout));
  }

  private static Deadline deadline(Duration timeout) {
    // What is too long for the unit becomes the longest.
    return timeout == null
        ? null
        : Deadline.after(TimeUnit.NANOSECONDS.convert(timeout), TimeUnit.NANOSECONDS);
  }

  String address() {
    return address;
  }

  void reached() {
    wasReached = true;
  }

  boolean wasReached() {
    return wasReached;
  }

  /** Dial at once, whatever the back-off after failed tries says. */
  void dialAgain() {
    channel.resetConnectBackoff();
  }

  /** Nobody reads a request any more. What is not heard of is ended by its attach window. */
  void end(String requestId) {
    // A thread that is interrupted could make no call.
    boolean wasInterrupted = Thread.interrupted();
    try {
      inference
          .withDeadlineAfter(CANCEL_TIMEOUT_MS, TimeUnit.MILLISECONDS)
          .cancel(CancelRequest.newBuilder().setRequestId(requestId).build());
    } catch (StatusRuntimeException error) {
      // Best effort.
    } finally {
      if (wasInterrupted) {
        Thread.currentThread().interrupt();
      }
    }
  }

  /** How a client reaches its server. */
  public static final class Builder {
    private final String address;
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private boolean isEncrypted;
    private String token;
    private boolean insecureToken;
    private Duration patience = Duration.ofSeconds(60);

    private Builder(String address) {
      this.address = address;
    }

    /** For example TlsChannelCredentials.create(), which trusts whom Java trusts. */
    public Builder tls(ChannelCredentials credentials) {
      this.credentials = credentials;
      isEncrypted = true;
      return this;
    }

    /** A bearer token for every call; without TLS only to this machine. */
    public Builder token(String token) {
      this.token = token;
      return this;
    }

    /** A token may go anywhere unencrypted: the network is trusted. */
    public Builder insecureToken() {
      insecureToken = true;
      return this;
    }

    /** For how long a lost request is looked for without news; 60 s if unset, zero: not at all. */
    public Builder reconnectTimeout(Duration patience) {
      this.patience = patience;
      return this;
    }

    /** IllegalArgumentException for a token that cannot be sent, or that others could read. */
    public SlotwiseClient build() {
      if (token != null && !token.matches("[!-~]+")) {
        // The token itself is never shown.
        throw new IllegalArgumentException(
            "the token is empty, or has characters besides printable ASCII");
      }
      if (token != null && !isEncrypted && !insecureToken && !isLocal(address)) {
        throw new IllegalArgumentException(
            "the token would go to " + address + " unencrypted; use tls, or allow it by"
                + " insecureToken where the network is trusted");
      }
      return new SlotwiseClient(this);
    }

    /** The address stays on this machine. What is not understood does not. */
    private static boolean isLocal(String address) {
      String host = address.substring(address.lastIndexOf('/') + 1).replaceFirst("^dns:", "");
      return address.startsWith("unix:")
          || host.matches("(localhost|127\\.\\d+\\.\\d+\\.\\d+|\\[::1\\])(:\\d+)?");
    }
  }
}
