// Reads a request on, of whatever program: attach [-server HOST:PORT] [-from TOKEN] REQUEST_ID
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"

	"slotwise"
)

func main() {
	server := flag.String("server", "127.0.0.1:50051", "address of the server")
	from := flag.Uint("from", 0, "index of the first token to read")
	flag.Parse()

	client, err := slotwise.Dial(*server)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	stream := client.Attach(context.Background(), flag.Arg(0), uint32(*from))
	for {
		event, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(event.GetDelta().GetText())
	}
	fmt.Println()
}
