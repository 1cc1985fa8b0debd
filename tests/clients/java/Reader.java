import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;
import java.time.Duration;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;
import slotwise.client.AnswerStream;
import slotwise.client.SlotwiseClient;
import slotwise.client.SlotwiseException;
import slotwise.v1.InferenceOuterClass.AttachRequest;
import slotwise.v1.InferenceOuterClass.CancelRequest;
import slotwise.v1.InferenceOuterClass.GenerateRequest;

/**
 * reader ADDRESS generate|complete|attach|cancel REQUEST [NAME=VALUE...]: prints what the client
 * tells, for the tests. The request, and the events, are serialized and in hex. Names:
 * reconnect_ms, timeout_ms, token, ca; drop_after, detach_after: after so many events the stream is
 * closed (the end of the input is waited for) or left; interrupt_after: its thread is interrupted.
 */
public final class Reader {
  private final Map<String, String> given;
  private final SlotwiseClient client;

  private Reader(String address, Map<String, String> given) throws IOException {
    this.given = given;
    SlotwiseClient.Builder builder = SlotwiseClient.builder(address);
    if (given.containsKey("reconnect_ms")) {
      builder.reconnectTimeout(milliseconds("reconnect_ms"));
    }
    if (given.containsKey("token")) {
      builder.token(given.get("token"));
    }
    if (given.containsKey("ca")) {
      File authority = new File(given.get("ca"));
      builder.tls(TlsChannelCredentials.newBuilder().trustManager(authority).build());
    }
    client = builder.build();
  }

  public static void main(String[] args) throws IOException {
    Map<String, String> given = new HashMap<>();
    for (int i = 3; i < args.length; i++) {
      String[] pair = args[i].split("=", 2);
      given.put(pair[0], pair[1]);
    }
    try {
      Reader reader = new Reader(args[0], given);
      reader.ask(args[1], ByteString.copyFrom(HexFormat.of().parseHex(args[2])));
      reader.client.close();
    } catch (IllegalArgumentException refused) {
      System.out.println("refused " + refused.getMessage());
    } catch (SlotwiseException error) {
      String message = error.getStatus().getDescription().replace('\n', ' ');
      long retryAfter = error.retryAfter().toMillis();
      String name = error.getStatus().getCode().name();
      System.out.println(
          "error " + String.join("\t", name, error.field(), "" + retryAfter, message));
    }
  }

  private void ask(String kind, ByteString request)
      throws InvalidProtocolBufferException, IOException {
    try {
      // A server that was never reached is not waited for.
      client.health("", Duration.ofSeconds(5));
    } catch (SlotwiseException error) {
      // The request tells.
    }
    Duration timeout = given.containsKey("timeout_ms") ? milliseconds("timeout_ms") : null;
    switch (kind) {
      case "cancel" -> client.cancel(CancelRequest.parseFrom(request).getRequestId());
      case "attach" -> read(client.attach(AttachRequest.parseFrom(request), timeout));
      case "complete" -> {
        var answer = client.complete(GenerateRequest.parseFrom(request), timeout);
        System.out.println("answer " + HexFormat.of().formatHex(answer.toByteArray()));
      }
      default -> read(client.generate(GenerateRequest.parseFrom(request), timeout));
    }
  }

  private void read(AnswerStream stream) throws IOException {
    int numEvents = 0;
    while (true) {
      String count = Integer.toString(numEvents);
      if (count.equals(given.get("drop_after")) || count.equals(given.get("detach_after"))) {
        if (given.containsKey("drop_after")) {
          stream.close();
          System.out.println("dropped");
          System.in.readAllBytes();
        } else {
          stream.detach();
        }
        return;
      }
      if (count.equals(given.get("interrupt_after"))) {
        Thread.currentThread().interrupt();
      }
      if (!stream.hasNext()) {
        return;
      }
      System.out.println("event " + HexFormat.of().formatHex(stream.next().toByteArray()));
      numEvents++;
    }
  }

  private Duration milliseconds(String name) {
    return Duration.ofMillis(Long.parseLong(given.get(name)));
  }
}
