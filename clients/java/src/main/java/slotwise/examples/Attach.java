package slotwise.examples;

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import slotwise.client.SlotwiseClient;
import slotwise.client.SlotwiseException;
import slotwise.v1.InferenceOuterClass.AttachRequest;

/** attach ADDRESS REQUEST_ID [NEXT]: reads a request on, from token NEXT of its answer. */
public final class Attach {
  public static void main(String[] args) {
    if (args.length < 2) {
      System.err.println("usage: attach ADDRESS REQUEST_ID [NEXT]");
      System.exit(2);
    }
    var out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    var where =
        AttachRequest.newBuilder()
            .setRequestId(args[1])
            .setNextTokenIndex(args.length > 2 ? Integer.parseUnsignedInt(args[2]) : 0)
            .build();
    try (var client = new SlotwiseClient(args[0]);
        var answer = client.attach(where, null)) {
      while (answer.hasNext()) {
        out.print(answer.next().getDelta().getText());
        out.flush();
      }
      out.println();
    } catch (SlotwiseException error) {
      System.err.println("error: " + error.getMessage());
      System.exit(1);
    }
  }
}
