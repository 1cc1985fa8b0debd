// Exits with 0 if the server is ready: health [-server HOST:PORT] [-service NAME]
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"slotwise"
)

func main() {
	server := flag.String("server", "127.0.0.1:50051", "address of the server")
	service := flag.String("service", slotwise.Service, "health name")
	flag.Parse()

	client, err := slotwise.Dial(*server)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	status, err := client.Health(ctx, *service)
	if err != nil {
		log.Fatal(err)
	}
	if status != healthpb.HealthCheckResponse_SERVING {
		log.Fatalf("%s at %s is %s", *service, *server, status)
	}
	fmt.Println(status)
}
