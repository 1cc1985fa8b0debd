package slotwise.examples;

import java.time.Duration;
import slotwise.client.SlotwiseClient;
import slotwise.client.SlotwiseException;
import slotwise.standard.Standard.HealthCheckResponse.ServingStatus;

/**
 * health ADDRESS [SERVICE]: exits 0 when it is SERVING, 1 when not. By default it is asked whether
 * requests are taken; of SERVICE "" whether the process lives.
 */
public final class Health {
  public static void main(String[] args) {
    if (args.length < 1) {
      System.err.println("usage: health ADDRESS [SERVICE]");
      System.exit(2);
    }
    String service = args.length > 1 ? args[1] : SlotwiseClient.SERVICE;
    try (var client = new SlotwiseClient(args[0])) {
      ServingStatus status = client.health(service, Duration.ofSeconds(5));
      boolean isServing = status == ServingStatus.SERVING;
      (isServing ? System.out : System.err).println(status);
      System.exit(isServing ? 0 : 1);
    } catch (SlotwiseException error) {
      System.err.println("error: " + error.getMessage());
      System.exit(1);
    }
  }
}
