// chat ADDRESS QUESTION [MAX_NEW_TOKENS]: streams an answer.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strconv"

	"slotwise"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 3 {
		log.Fatal("usage: chat ADDRESS QUESTION [MAX_NEW_TOKENS]")
	}
	limit, err := strconv.ParseUint(append(os.Args, "64")[3], 10, 32)
	check(err)
	client, err := slotwise.Dial(os.Args[1])
	check(err)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	stream := client.Chat(ctx, os.Args[2],
		slotwise.Temperature(0), slotwise.MaxNewTokens(uint32(limit)))
	for event, err := stream.Recv(); err != io.EOF; event, err = stream.Recv() {
		check(err)
		fmt.Print(event.GetDelta().GetText())
	}
	fmt.Println()
}

func check(err error) {
	var failed *slotwise.Error
	if errors.As(err, &failed) && failed.Field() != "" {
		log.Println("field:", failed.Field())
	}
	if err != nil {
		log.Fatal("error: ", err)
	}
}
