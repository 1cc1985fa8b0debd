// Streams the answer to a question: chat [-server HOST:PORT] [-max-new-tokens N] QUESTION
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"

	"slotwise"
)

func main() {
	server := flag.String("server", "127.0.0.1:50051", "address of the server")
	limit := flag.Uint("max-new-tokens", 128, "most tokens of the answer")
	flag.Parse()

	client, err := slotwise.Dial(*server)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	stream := client.Chat(ctx, strings.Join(flag.Args(), " "),
		slotwise.Temperature(0), slotwise.MaxNewTokens(uint32(*limit)))
	log.Println("request", stream.RequestID())
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
