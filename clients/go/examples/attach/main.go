// attach ADDRESS REQUEST_ID [NEXT]: reads a request on, from token NEXT of its answer.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strconv"

	"slotwise"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 3 {
		log.Fatal("usage: attach ADDRESS REQUEST_ID [NEXT]")
	}
	log.SetPrefix("error: ")
	next := uint64(0)
	if len(os.Args) > 3 {
		var err error
		next, err = strconv.ParseUint(os.Args[3], 10, 32)
		check(err)
	}
	client, err := slotwise.Dial(os.Args[1])
	check(err)
	stream := client.Attach(context.Background(), os.Args[2], uint32(next))
	for {
		event, err := stream.Recv()
		if err == io.EOF {
			break
		}
		check(err)
		fmt.Print(event.GetDelta().GetText())
	}
	fmt.Println()
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
