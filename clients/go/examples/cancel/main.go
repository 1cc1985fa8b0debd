// Stops a request, of whatever program: cancel [-server HOST:PORT] REQUEST_ID
package main

import (
	"context"
	"flag"
	"log"

	"slotwise"
)

func main() {
	server := flag.String("server", "127.0.0.1:50051", "address of the server")
	flag.Parse()

	client, err := slotwise.Dial(*server)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	if err := client.Cancel(context.Background(), flag.Arg(0)); err != nil {
		log.Fatal(err)
	}
}
