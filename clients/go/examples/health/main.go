// health ADDRESS [SERVICE]: exits 0 when it is SERVING, 1 when not. By default it is asked whether
// requests are taken; of SERVICE "" whether the process lives.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"slotwise"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: health ADDRESS [SERVICE]")
	}
	service := slotwise.Service
	if len(os.Args) > 2 {
		service = os.Args[2]
	}
	client, err := slotwise.Dial(os.Args[1])
	if err != nil {
		log.Fatal("error: ", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	status, err := client.Health(ctx, service)
	if err != nil {
		log.Fatal("error: ", err)
	}
	if status != healthpb.HealthCheckResponse_SERVING {
		log.Fatal(status)
	}
	fmt.Println(status)
}
