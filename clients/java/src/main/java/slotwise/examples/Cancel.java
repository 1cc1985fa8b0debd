package slotwise.examples;

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import slotwise.client.SlotwiseClient;
import slotwise.client.SlotwiseException;
import slotwise.v1.InferenceOuterClass.GenerateRequest;

/** cancel ADDRESS QUESTION NUM_EVENTS: reads so many events of an answer, then stops it. */
public final class Cancel {
  public static void main(String[] args) {
    if (args.length < 3) {
      System.err.println("usage: cancel ADDRESS QUESTION NUM_EVENTS");
      System.exit(2);
    }
    var out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    try (var client = new SlotwiseClient(args[0]);
        var answer = client.chat(args[1], GenerateRequest.getDefaultInstance())) {
      for (int i = Integer.parseInt(args[2]); i > 0 && answer.hasNext(); i--) {
        out.print(answer.next().getDelta().getText());
      }
      // The end of the block does it too; client.cancel(requestId) ends any other request.
      answer.close();
      out.println("\ncancelled " + answer.requestId());
    } catch (SlotwiseException error) {
      System.err.println("error: " + error.getMessage());
      System.exit(1);
    }
  }
}
