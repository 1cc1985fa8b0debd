package slotwise.examples;

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import slotwise.client.SlotwiseClient;
import slotwise.client.SlotwiseException;
import slotwise.v1.InferenceOuterClass.GenerateRequest;
import slotwise.v1.InferenceOuterClass.SamplingParams;

/** chat ADDRESS QUESTION [MAX_NEW_TOKENS]: streams an answer. */
public final class Chat {
  public static void main(String[] args) {
    if (args.length < 2) {
      System.err.println("usage: chat ADDRESS QUESTION [MAX_NEW_TOKENS]");
      System.exit(2);
    }
    var out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    var options =
        GenerateRequest.newBuilder()
            .setSampling(SamplingParams.newBuilder().setTemperature(0))
            .setMaxNewTokens(args.length > 2 ? Integer.parseUnsignedInt(args[2]) : 64)
            .build();

    try (var client = new SlotwiseClient(args[0]);
        var answer = client.chat(args[1], options)) {
      while (answer.hasNext()) {
        out.print(answer.next().getDelta().getText());
        out.flush();
      }
      out.println();
    } catch (SlotwiseException error) {
      System.err.println("error: " + error.getMessage());
      System.err.println("field: " + error.field());
      System.exit(1);
    }
  }
}
