package slotwise.client;

import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.Optional;
import java.util.stream.Stream;
import slotwise.standard.Standard;
import slotwise.standard.Standard.BadRequest;
import slotwise.standard.Standard.Detail;
import slotwise.standard.Standard.ErrorInfo;
import slotwise.standard.Standard.RetryInfo;

/** A call that failed, with gRPC's status and what the server said besides. */
public final class SlotwiseException extends StatusRuntimeException {
  private static final long serialVersionUID = 1;
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

  SlotwiseException(Status status, Metadata trailers) {
    super(status, trailers);
  }

  static SlotwiseException of(Status.Code code, String message) {
    return new SlotwiseException(code.toStatus().withDescription(message), new Metadata());
  }

  static SlotwiseException of(StatusRuntimeException error, String address) {
    Status status = error.getStatus();
    Metadata trailers = error.getTrailers() == null ? new Metadata() : error.getTrailers();
    if (status.getCode() == Status.Code.UNAVAILABLE && !trailers.containsKey(DETAILS)) {
      String why = status.getDescription();
      // The last cause knows best: a refused connection, a certificate that nobody trusts.
      for (Throwable cause = status.getCause(); cause != null; cause = cause.getCause()) {
        why = cause.getMessage();
      }
      status = status.withDescription("no answer from " + address + ": " + why);
    }
    return new SlotwiseException(status, trailers);
  }

  /** What the server refused, such as "sampling.temperature"; "" where it named nothing. */
  public String field() {
    return detail(BadRequest.getDefaultInstance())
        .filter(bad -> bad.getFieldViolationsCount() > 0)
        .map(bad -> bad.getFieldViolations(0).getField())
        .orElse("");
  }

  /** How long to wait before trying again, where a full queue said so; else zero. */
  public Duration retryAfter() {
    return detail(RetryInfo.getDefaultInstance())
        .map(RetryInfo::getRetryDelay)
        .map(delay -> Duration.ofSeconds(delay.getSeconds(), delay.getNanos()))
        .orElse(Duration.ZERO);
  }

  Status.Code code() {
    return getStatus().getCode();
  }

  /** Tells statuses of one code apart. */
  String reason() {
    return detail(ErrorInfo.getDefaultInstance()).map(ErrorInfo::getReason).orElse("");
  }

  /** The stream broke off on the way, without a word of the server. */
  boolean isLoss() {
    if (getTrailers().containsKey(DETAILS)) {
      return false;
    }
    return switch (code()) {
      case UNAVAILABLE, CANCELLED -> true;
        // By codes that a server has too, gRPC tells of a connection that broke.
      case INTERNAL, UNKNOWN ->
          Stream.of("RST_STREAM", "Rst Stream", "GOAWAY", "http2", "HTTP/2", "EOS", "Connection")
              .anyMatch(String.valueOf(getStatus().getDescription())::contains);
      default -> false;
    };
  }

  private <T extends Message> Optional<T> detail(T kind) {
    byte[] details = getTrailers().get(DETAILS);
    if (details == null) {
      return Optional.empty();
    }
    String name = "/google.rpc." + kind.getDescriptorForType().getName();
    try {
      for (Detail detail : Standard.Status.parseFrom(details).getDetailsList()) {
        if (detail.getTypeUrl().endsWith(name)) {
          @SuppressWarnings("unchecked")
          T found = (T) kind.getParserForType().parseFrom(detail.getValue());
          return Optional.of(found);
        }
      }
    } catch (InvalidProtocolBufferException error) {
      // Of no server of ours; the status is there all the same.
    }
    return Optional.empty();
  }
}
